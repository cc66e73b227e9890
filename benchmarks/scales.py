"""The scales of BERT-Large's tensors with random weights, stock and unit-scaled: docs/scales.md.

    python benchmarks/scales.py [--keep]

--keep writes results/scales.json, in which corresponding modules of all blocks share a row, and the page's plot.
It takes 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from halfstep.lab.environment import environment
from halfstep.probe.spread import KINDS
from harness import RESULTS


PICTURE = RESULTS.parent.parent / "docs" / "images" / "scales_bert_large.png"
WORDS = ["bert-large", "--batch", "2", "--context", "128", "--unit"]


def measured(options: list[str]) -> dict[str, Any]:
    """The JSON output of `halfstep scales`, with every tensor."""
    command = [sys.executable, "-m", "halfstep", "scales", *WORDS, "--json", *options]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def folded(scales: dict[str, Any]) -> dict[str, Any]:
    """The scales of one moment, with corresponding modules of all blocks in one row, and the shares by kind of
    tensor."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for tensor in scales["tensors"]:
        rows.setdefault((tensor["folded"], tensor["tensor"], tensor["kind"]), []).append(tensor)
    totals = {name: value for name, value in scales.items() if name != "tensors"}
    table = [
        {
            "module": module,
            "tensor": tensor,
            "kind": kind,
            "tensors": len(found),
            "smallest_std": float(f"{min(each['std'] for each in found):.4g}"),
            "largest_std": float(f"{max(each['std'] for each in found):.4g}"),
        }
        for (module, tensor, kind), found in rows.items()
    ]
    return totals | {"shares": {kind: shares(scales, kind) for kind in KINDS}, "rows": table}


def shares(scales: dict[str, Any], kind: str) -> dict[str, dict[str, float]]:
    """By format, the shares of a kind of tensor's values that become zero, subnormal or exceed the range: means over
    tensors, weighted by size."""
    found = [tensor for tensor in scales["tensors"] if tensor["kind"] == kind]
    values = sum(tensor["values"] for tensor in found)
    return {
        name: {
            what: float(f"{sum(t['values'] * t['formats'][name][what] for t in found) / values:.4g}")
            for what in ("zero", "subnormal", "beyond")
        }
        for name in scales["formats"]
    }


def table(data: dict[str, Any]) -> str:
    """The table of shares of docs/scales.md."""
    names = data["scales"][0]["formats"]
    heads = [f"{name.removeprefix('float8_')}: {what}" for name in names for what in ("zero", "subnormal")]
    lines = [f"| | values of | {' | '.join(heads)} |", "| --- " * (2 + len(heads)) + "|"]
    for scales in data["scales"]:
        for kind, found in scales["shares"].items():
            cells = [f"{found[name][what]:.1%}" for name in names for what in ("zero", "subnormal")]
            lines.append(f"| {scales['moment']} | {kind}s | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    found = measured(["--plot", str(PICTURE)] if arguments.keep else [])
    command = " ".join(["halfstep scales", *WORDS])
    data = {"machine": environment(), "command": command, "scales": [folded(each) for each in found["scales"]]}
    print(table(data))
    if arguments.keep:
        (RESULTS / "scales.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
