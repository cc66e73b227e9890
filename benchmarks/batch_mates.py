"""Whether a row's logits depend on the rest of its batch, and on the number of tokens per call.

    python benchmarks/batch_mates.py [--keep]

Measures Euclidean distances of logits for a small Llama with random weights: between a row alone and the same row in a
batch, and between tokens fed one by one with a KV cache and all in one call. --keep writes results/batch_mates.json and
the table of docs/inference.md between `<!-- mates -->` marks.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from generation import llama, quantized
from halfstep.lab.environment import environment
from harness import RESULTS, keep


WIDE = {"fp32": "fp32", "bf16": "bf16-pure"}
RECIPES = ("fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "nf4", "int8-weight-only")
TOKENS, ROWS = 32, (16, 128)
PAGE = RESULTS.parent.parent / "docs" / "inference.md"
TABLE = re.compile(r"(?<=<!-- mates -->\n).*?(?=<!-- end mates -->)", re.DOTALL)


def in_precision(model: nn.Module, name: str) -> Any:
    """The model in the precision that a row of the table names."""
    if name not in WIDE:
        return quantized(model, name)
    halfstep.apply(model, WIDE[name])
    return model.eval()


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """The Euclidean distance between two tensors, relative to the norm of `expected`."""
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def distances(name: str) -> dict[str, float]:
    """How far the row's logits are from those of the row alone in one call: in a batch of each size, and token by token
    with a KV cache."""
    model = in_precision(llama(), name)
    rows = torch.randint(0, 512, (max(ROWS), TOKENS), generator=torch.Generator().manual_seed(0))
    alone = model(rows[:1]).logits
    found = {f"{count} rows": relative_distance(model(rows[:count]).logits[:1], alone) for count in ROWS}
    cache, steps = None, []
    for token in rows[:1].unbind(1):
        result = model(token[:, None], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        steps.append(result.logits)
    return {**found, "KV cache": relative_distance(torch.cat(steps, 1), alone)}


def table(data: dict[str, Any]) -> str:
    """The table of docs/inference.md."""
    heads = [*(f"among {count} rows" for count in ROWS), "token by token"]
    lines = [f"| weights | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for name, found in data["distances"].items():
        lines.append(f"| `{name}` | {' | '.join(f'{far:.2%}' if far else '0' for far in found.values())} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    data = {"machine": environment(), "distances": {name: distances(name) for name in (*WIDE, *RECIPES)}}
    print(table(data))
    if arguments.keep:
        keep("batch_mates", data)
        PAGE.write_text(TABLE.sub(lambda _: table(data), PAGE.read_text()))


if __name__ == "__main__":
    main()
