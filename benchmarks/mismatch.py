"""The distance of a trainer's next-token distributions from a rollout's by recipe, for a small trained GPT.

    python benchmarks/mismatch.py [--keep] [--out FOLDER]

The GPT is that of finetune.py, pre-trained in bf16-mixed; tokens are from its held-out text. --keep writes
results/mismatch.json and the table of docs/mismatch.md between `<!-- mismatch -->` marks.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch

import halfstep
from finetune import LEAN, loaded, pretrained
from halfstep.lab.environment import environment
from halfstep.lab.task import load_corpus
from halfstep.lab.tasks import experiment_for
from harness import RESULTS, keep


TRAIN = ("bf16-mixed", "fp16-mixed", "fp8-current")
ROLLOUT = (
    "fp32", "bf16-mixed", "fp16-mixed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4", "nf4",
)  # fmt: skip
PAGE = RESULTS.parent.parent / "docs" / "mismatch.md"
TABLE = re.compile(r"(?<=<!-- mismatch -->\n).*?(?=<!-- end mismatch -->)", re.DOTALL)


def table(data: dict[str, Any]) -> str:
    """The table of KL and clipped shares, one row per rollout."""
    heads = [f"trained under `{name}`" for name in data["train"]]
    lines = [f"| generates under | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for rollout, row in data["rows"].items():
        cells = [f"{one['kl']:.1e}; {one['clipped']:.1%}" if one["kl"] else "0" for one in row.values()]
        lines.append(f"| `{rollout}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/which_bf16_finetune"))
    arguments = parser.parse_args()
    experiment = experiment_for("lm", recipes=("fp32",), seeds=1, **LEAN)
    model = loaded(experiment, pretrained(arguments.out / "pretrained"))
    held = load_corpus(None, experiment.context).held_out
    tokens = held[: 64 * experiment.context].view(64, experiment.context).long()
    batches = [*tokens.split(16)]
    rows = {
        rollout: {train: halfstep.mismatch(model, batches, train, rollout).to_dict() for train in TRAIN}
        for rollout in ROLLOUT
    }
    data = {"machine": environment(), "train": TRAIN, "tokens": tokens.numel(), "rows": rows}
    print(table(data))
    if arguments.keep:
        keep("mismatch", data)
        PAGE.write_text(TABLE.sub(lambda _: table(data), PAGE.read_text()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
