"""Runs every way of use under every recipe and writes the results: `python tests/uses/table.py --write`.

It writes outcomes.json, which the tests check, and the table of docs/using.md, which is rendered from it. File names
(`table.py test_gan test_steps`) run only those; `--render` runs nothing."""

import importlib
import json
import sys
import warnings
from collections import defaultdict
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from ways import EVERY, OUTCOMES, WRONG, outcomes  # noqa: E402

from marked import Marked  # noqa: E402


TABLE = Marked(
    HERE.parent.parent / "docs" / "using.md", "<!-- begin: written by tests/uses/table.py -->\n", "<!-- end -->\n"
)


def ways(files=()):
    """All ways, in the order of file names and lines."""
    for file in sorted(HERE.glob("test_*.py")):
        if not files or file.stem in files:
            for member in [*vars(importlib.import_module(file.stem)).values()]:
                if hasattr(member, "way"):
                    yield member.way


def refusals(way):
    """The recipes that do not work in this way, with the reasons."""
    reasons = {}
    for name in EVERY:
        try:
            reasons.update(outcomes(way, [name]))
        except AssertionError as error:
            reasons[name] = WRONG
            print(f"  {error}".replace("\n", "\n  "))
    return reasons


def render(recorded):
    """The table, followed by the reasons with their recipes."""
    notes, rows = {}, []
    for way in ways():
        grouped = defaultdict(list)
        for name, reason in recorded.get(way.title, {}).items():
            grouped[reason].append(name)
        marks = []
        for reason, names in grouped.items():
            note = f"{reason[:1].upper()}{reason[1:]}: {', '.join(f'`{name}`' for name in names)}."
            marks.append(f"[{notes.setdefault(note, len(notes) + 1)}]")
        recipes = (
            "all" if not marks else f"{len(EVERY) - len(recorded[way.title])} of {len(EVERY)}, not {', '.join(marks)}"
        )
        rows.append(f"| {way.title} | {way.how} | {recipes} |")
    lines = ["| way | how | recipes |", "| --- | --- | --- |", *rows, ""]
    lines += [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join(lines).replace(" |\n\n1.", " |\n\nThe exceptions:\n\n1.").strip() + "\n"


def main(arguments):
    files = [argument for argument in arguments if not argument.startswith("--")]
    recorded = json.loads(OUTCOMES.read_text()) if files or "--render" in arguments else {}
    if "--render" not in arguments:
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        for way in ways(files):
            print(way.title, flush=True)
            recorded[way.title] = refusals(way)
    order = [way.title for way in ways()]
    recorded = {title: recorded[title] for title in order if title in recorded}
    if "--write" in arguments:
        OUTCOMES.write_text(json.dumps(recorded, indent=1) + "\n")
        TABLE.write(render(recorded))
    return any(reason == WRONG for reasons in recorded.values() for reason in reasons.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
