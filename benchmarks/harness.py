"""Time several ways of doing the same work in one run, interleaved, and keep the ratios.

Clocks drift and neighbours come and go, so a figure stands only beside one taken at the same time: every round runs
every contender once, in shuffled order, and what is reported is the median over rounds and the median of the
round-by-round ratios.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from halfstep.lab.environment import environment


RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Contender:
    """One way of doing the work, the one it is measured against, and the ratio that it must not pass."""

    name: str
    run: Callable[[], Any]
    against: str | None = None
    at_most: float | None = None


def race(contenders: list[Contender], rounds: int, warmup: int = 2) -> list[dict[str, Any]]:
    """Time every contender once a round; one row each: median seconds, median ratio, the bar and whether it is met."""
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    shuffle = random.Random(0).sample
    for number in range(rounds + warmup):
        for contender in shuffle(contenders, len(contenders)):
            gc.collect()
            started = time.perf_counter()
            contender.run()
            elapsed = time.perf_counter() - started
            if number >= warmup:
                seconds[contender.name].append(elapsed)
    rows = []
    for c in contenders:
        row: dict[str, Any] = {"name": c.name, "median_ms": 1000 * statistics.median(seconds[c.name])}
        if c.against is not None:
            ratios = [own / other for own, other in zip(seconds[c.name], seconds[c.against], strict=True)]
            ratio = statistics.median(ratios)
            row |= {"against": c.against, "ratio": ratio, "at_most": c.at_most}
            row["met"] = None if c.at_most is None else ratio <= c.at_most
        rows.append(row)
    return rows


def report(name: str, question: str, rows: list[dict[str, Any]], rounds: int) -> None:
    """Print the rows; with --keep on the command line, keep them in results/NAME.json beside the machine's name."""
    table = Table("contender", "median", "against", "ratio", "at most", title=question, title_justify="left", box=None)
    for row in rows:
        bar = row.get("at_most")
        table.add_row(
            row["name"],
            f"{row['median_ms']:.1f} ms",
            row.get("against", ""),
            f"{row['ratio']:.3f}" if "ratio" in row else "",
            "" if bar is None else f"{bar:g} {'met' if row['met'] else 'MISSED'}",
        )
    Console(width=120).print(table)
    if "--keep" in sys.argv:
        RESULTS.mkdir(exist_ok=True)
        data = {"question": question, "rounds": rounds, "machine": environment(), "rows": rows}
        (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
