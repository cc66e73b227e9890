"""Train under every recipe in every integration and record the outcome.

    python tests/integrations/matrix.py --write             # every column: matrix.json, and docs/integrations.md
    python tests/integrations/matrix.py --write trainer     # only that column
    python tests/integrations/matrix.py --render --write    # runs nothing: renders the table from matrix.json

A column is a file matrix_NAME.py in this folder, with its heading `COLUMN` and a function `trains(recipe)`, which
trains a small model in that library's own loop under the named recipe, asserts that the result is right, and returns
None. A `HalfstepError` that it raises is a refusal; its first sentence is the cell's reason. Any other exception is a
fault. tests/integrations/test_matrix.py compares matrix.json with every column's outcomes."""

import importlib
import json
import sys
import warnings
from collections import defaultdict
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "uses")]

import torch  # noqa: E402
from ways import WRONG, sentence  # noqa: E402

import halfstep  # noqa: E402
from marked import Marked  # noqa: E402
from tiny import EVERY  # noqa: E402


KEPT = HERE / "matrix.json"
TABLE = Marked(HERE.parent.parent / "docs" / "integrations.md", "<!-- begin: matrix -->\n", "<!-- end: matrix -->\n")
QUICK = ("bf16-stochastic", "fp16-mixed", "fp8lm-o2")


def columns():
    """The names of the columns that have a file."""
    return sorted(file.stem.removeprefix("matrix_") for file in HERE.glob("matrix_*.py"))


def refusals(column, recipes):
    """The reason for each recipe that this column refuses.

    Raises:
        AssertionError: names the recipes that trained or were refused wrongly.
    """
    trains = importlib.import_module(f"matrix_{column}").trains
    refused, wrong, first = {}, [], None
    for recipe in recipes:
        torch.manual_seed(0)
        try:
            assert trains(recipe) is None, "trains() returns None"
        except halfstep.HalfstepError as error:
            refused[recipe] = sentence(str(error))
        except Exception as error:
            wrong.append(f"{recipe}: {type(error).__name__}: {str(error).strip()[:600]}")
            first = first or error
    if wrong:
        raise AssertionError(f"{column}:\n" + "\n".join(wrong)) from first
    return refused


def found(column):
    reasons = {}
    for recipe in EVERY:
        try:
            reasons |= refusals(column, [recipe])
        except AssertionError as error:
            reasons[recipe] = WRONG
            print(f"  {error}".replace("\n", "\n  "), flush=True)
    return reasons


def render(kept):
    """The table, followed by the reasons for refusals."""
    if not kept:
        return ""
    headings = [importlib.import_module(f"matrix_{column}").COLUMN for column in kept]
    notes: dict[str, int] = {}
    lines = [f"| recipe | {' | '.join(headings)} |", "| --- |" + " --- |" * len(headings)]
    grouped = defaultdict(list)
    for recipe in EVERY:
        reasons = [refused.get(recipe) for refused in kept.values()]
        cells = [f"refused [{notes.setdefault(reason, len(notes) + 1)}]" if reason else "works" for reason in reasons]
        grouped[tuple(cells)].append(f"`{recipe}`")
    for cells, recipes in grouped.items():
        lines.append(f"| {', '.join(recipes)} | {' | '.join(cells)} |")
    if notes:
        lines += ["", *(f"{number}. {reason[:1].upper()}{reason[1:]}." for reason, number in notes.items())]
    return "\n".join(lines) + "\n"


def main(arguments):
    chosen = [argument for argument in arguments if not argument.startswith("--")] or columns()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if "--render" not in arguments:
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        for column in chosen:
            print(column, flush=True)
            kept[column] = found(column)
    kept = {column: kept[column] for column in columns() if column in kept}
    if "--write" in arguments:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        TABLE.write(render(kept))
    return any(reason == WRONG for refused in kept.values() for reason in refused.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
