"""Write the tables of docs/inspect.md: the verdicts on checkpoints of known origin, and the measured speed."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import tempfile
from pathlib import Path

import halfstep
from halfstep.kb import lookup


ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "inspect.md"
RESULTS = Path(__file__).parent / "results" / "inspect.json"
SMALL = Path(__file__).parent / "results" / "inspect_small.json"


def origins() -> str:
    """The table of checkpoints, one row each: how it was made, what its bits say, and whether the knowledge base has
    it."""
    rows = ["| made as | what the bits say | sure | the knowledge base |", "| --- | --- | --- | --- |"]
    example = runpy.run_path(str(ROOT / "examples" / "known_origins.py"))["main"]
    with tempfile.TemporaryDirectory() as folder:
        for path in example(folder):
            found = halfstep.inspect(path).verdict
            known = "an entry" if lookup(path.stem, overlay=None).known else "no entry"
            rows.append(f"| {path.stem.replace('_', ' ')} | {found.text} | {found.confidence} | {known} |")
    return "\n".join(rows)


def speed() -> str:
    """The bars and the figures of benchmarks/inspect_speed.py."""
    data = json.loads(RESULTS.read_text())
    rows = ["| | GB | GB/s and core |", "| --- | --- | --- |"]
    rows += [f"| {name} | {run['gb']:.2f} | {run['gb_per_cpu_second']:.2f} |" for name, run in data["runs"].items()]
    lines = []
    for bar in data["bars"]:
        target = (
            "" if bar["at_least"] is None else f"; target {bar['at_least']:g}: {'met' if bar['met'] else '**missed**'}"
        )
        lines.append(f"- {bar['bar']}: {bar['value']:.2f}{target}.")
    used = ", ".join(f"{name} {value:.0f} MB" for name, value in data["rss_anon_mb"].items())
    machine = data["machine"]
    lines.append(f"- Anonymous memory above import: {used}.")
    few = json.loads(SMALL.read_text())
    for name, seconds in few["cpu_seconds"].items():
        met = "met" if seconds <= few["at_most"] else "**missed**"
        target = f"target at most {few['at_most']:g}: {met}"
        lines.append(f"- {few['tensors']:,} tensors of 64 to 256 values, {name}: {seconds:.1f} s of CPU; {target}.")
    return "\n".join([*rows, "", *lines, "", f"torch {machine['torch']} on {machine['cpu']}, one thread."])


def replaced(text: str, name: str, table: str) -> str:
    """The page with a table inserted between its marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n\n{table}\n\n{end}", text, flags=re.DOTALL)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    page = replaced(PAGE.read_text(), "origins", origins())
    PAGE.write_text(replaced(page, "speed", speed()) if RESULTS.exists() else page)
