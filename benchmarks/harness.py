"""Time several ways of doing the same work in one run, interleaved, and store the ratios.

Clock speeds and other load vary, so times are only compared with times taken in the same round: every round runs
every contender once, in shuffled order. Reported are the median over rounds, and the median of the
round-by-round ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
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
    """One way of doing the work, the contender whose time it is divided by, and the largest ratio allowed."""

    name: str
    run: Callable[[], Any]
    against: str | None = None
    at_most: float | None = None
    is_peer: bool = False
    """Whether it is another library, which may not run with this torch: the others are then timed without it."""


def timings(
    runs: dict[str, Callable[[], Any]], rounds: int, warmup: int = 2, span: float = 0.0
) -> dict[str, list[float]]:
    """Seconds per call of every run, one entry per round: each has one turn per round, in shuffled order.

    A turn is one call. With a `span` (seconds) it is one untimed warm-up call, then calls until the span has passed,
    whose mean counts: microseconds cannot be measured from one call with cold caches after another run. Calls longer
    than ten spans have no warm-up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0).sample
    gc.collect()
    gc.freeze()  # collections between turns skip what is alive now
    for number in range(rounds + warmup):
        for name in shuffle(list(runs), len(runs)):
            gc.collect()
            if span and (not seconds[name] or seconds[name][-1] <= 10 * span):
                runs[name]()
            elapsed = _turn(runs[name], span)
            if number >= warmup:
                seconds[name].append(elapsed)
    gc.unfreeze()
    return seconds


def _turn(run: Callable[[], Any], span: float) -> float:
    calls, started = 0, time.perf_counter()
    while True:
        run()
        calls += 1
        elapsed = time.perf_counter() - started
        if elapsed >= span:
            return elapsed / calls


def ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
    """The median over rounds of the ratio of two times in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def race(contenders: list[Contender], rounds: int, warmup: int = 2) -> list[dict[str, Any]]:
    """Time every contender once per round. One row each: median milliseconds, median ratio, the bar and whether it is
    met.

    A peer whose first call fails has a row with its error, and contenders compared with it have none.
    """
    failed = {c.name: why for c in contenders if c.is_peer and (why := _failure(c.run)) is not None}
    seconds = timings({c.name: c.run for c in contenders if c.name not in failed}, rounds, warmup)
    rows = []
    for c in contenders:
        if c.name in failed:
            rows.append({"name": c.name, "failed": failed[c.name]})
            continue
        if c.against in failed:
            continue
        row: dict[str, Any] = {"name": c.name, "median_ms": 1000 * statistics.median(seconds[c.name])}
        if c.against is not None:
            row |= {"against": c.against, "ratio": ratio(seconds, c.name, c.against), "at_most": c.at_most}
            row["met"] = None if c.at_most is None else row["ratio"] <= c.at_most
        rows.append(row)
    return rows


def _failure(run: Callable[[], Any]) -> str | None:
    """What a call raises, in one line."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def keeps(doc: str | None) -> bool:
    """Whether --keep is on the command line. --help prints the text; other arguments are an error before anything
    runs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write the figures to benchmarks/results")
    return bool(parser.parse_args().keep)


def report(name: str, question: str, rows: list[dict[str, Any]], rounds: int, kept: bool) -> None:
    """Print the rows; if `kept`, write them to results/NAME.json with the machine's description."""
    heads = ["contender", "median", "against", "ratio", "at most"]
    if any("state_bytes" in row for row in rows):
        heads.append("state bytes a parameter")
    table = Table(*heads, title=question, title_justify="left", box=None)
    for row in rows:
        if "failed" in row:
            table.add_row(row["name"], "does not run here", row["failed"])
            continue
        bar = row.get("at_most")
        table.add_row(
            row["name"],
            f"{row['median_ms']:.1f} ms",
            row.get("against", ""),
            f"{row['ratio']:.3f}" if "ratio" in row else "",
            "" if bar is None else f"{bar:g} {'met' if row['met'] else 'MISSED'}",
            *([f"{row['state_bytes']:.4f}"] if "state_bytes" in row else []),
        )
    Console(width=120).print(table)
    if kept:
        keep(name, {"question": question, "rounds": rounds, "machine": environment(), "rows": rows})


def keep(name: str, data: dict[str, Any]) -> None:
    """Write the figures to results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
