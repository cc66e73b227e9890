"""The tables of quantize.json, for the terminal and for docs/benchmarks.md between its two marks.

`python benchmarks/quantize_tables.py` rewrites the page from the stored results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from harness import RESULTS


RESULT = RESULTS / "quantize.json"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- quantize: begin -->", "<!-- quantize: end -->"


def terminal(data: dict[str, Any]) -> None:
    """Print the tables of the page."""
    Console(width=150).print(Markdown(markdown(data)))


def write_page() -> None:
    """Insert the tables of the stored results between the marks of docs/benchmarks.md."""
    page = PAGE.read_text()
    head, tail = page[: page.index(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{head}{BEGIN}\n\n{markdown(json.loads(RESULT.read_text()))}\n{tail}")


def markdown(data: dict[str, Any]) -> str:
    """The machine, the bars, and one table of figures per size."""
    machine = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in data["peers"].items())
    lines = [f"{machine['cpu']}, {machine['threads']} threads, {machine['cpu_capability']}. {versions}."]
    lines += [f"Without {name}: {reason}." for name, reason in data["missing"].items()]
    for size, found in data["sizes"].items():
        given, fresh = found["copy_gb_per_second"], found["fresh_copy_gb_per_second"]
        lines.append(
            f"A float32 copy of {size} elements moves {given:.0f} GB/s into a given buffer, {fresh:.0f} GB/s into "
            f"fresh memory; medians of {found['rounds']} rounds."
        )
    parts = ["\n".join(lines), _bars(data["sizes"])]
    parts += [f"Million elements a second at {size}:\n\n{_figures(found)}" for size, found in data["sizes"].items()]
    return "\n\n".join(parts) + "\n"


def _bars(sizes: dict[str, Any]) -> str:
    """The table of bars: one row per bar, one column per size."""
    bars: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for size, found in sizes.items():
        for bar in found["bars"]:
            bars.setdefault((bar["work"], bar["ours"], bar["against"]), {})[size] = bar
    lines = [_line("work", "against", "bar", *sizes), _line("---", "---", "---", *["---"] * len(sizes))]
    for (work, ours, against), by_size in bars.items():
        limits = dict.fromkeys(_limit(bar) for bar in by_size.values())
        title = work if "," not in ours else f"{work}, {ours.partition(', ')[2]}"
        cells = [_verdict(by_size.get(size)) for size in sizes]
        lines.append(_line(title, against.replace(f"{work} ", ""), ", then ".join(limits), *cells))
    return "\n".join(lines)


def _limit(bar: dict[str, Any]) -> str:
    if bar["at_most"] is not None:
        return f"at most {bar['at_most']:g}x its time"
    return f"{bar['at_least']:g}x faster"


def _verdict(bar: dict[str, Any] | None) -> str:
    if bar is None:
        return ""
    if bar["ratio"] is None:
        return "not measured"
    figure = f"{bar['ratio']:.2f}" if bar["ratio"] < 10 else f"{bar['ratio']:.0f}"
    return figure if bar["met"] else f"**{figure} MISSED**, {bar['over_roofline']:.2f} of a copy's time"


def _figures(found: dict[str, Any]) -> str:
    """The table of speeds: one row per task, one column per library; ours with the ratio to a plain copy of the same
    bytes."""
    rows = [row for row in found["rows"] if not row["work"].startswith("copy")]
    who = list(dict.fromkeys(row["who"] for row in rows))
    lines = [_line("work", *who), _line("---", *["---:"] * len(who))]
    for work in dict.fromkeys(row["work"] for row in rows):
        by_who = {row["who"]: row for row in rows if row["work"] == work}
        lines.append(_line(work, *[_figure(by_who.get(name)) for name in who]))
    return "\n".join(lines)


def _figure(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    speed = f"{row['melements_per_second']:,.0f}"
    return f"{speed} ({row['over_roofline']:.2f})" if "over_roofline" in row else speed


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_page()
