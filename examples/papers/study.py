"""Shared by the studies in this folder: options, runs saved as they end, intervals over seeds, and tables."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import halfstep
from halfstep.lab.environment import environment
from halfstep.lab.interval import Interval, paired
from halfstep.lab.task import Corpus, load_corpus
from halfstep.quant import Quantizer
from halfstep.recipe import Recipe, Rule, linear_spec
from halfstep.recipe.operands import KEEP


Run = dict[str, Any]


def options(doc: str, out: str, seeds: int = 3) -> argparse.Namespace:
    """The command line of a study: --quick, --seeds and --out, the JSON file of finished runs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: shows that it runs, no more")
    parser.add_argument("--seeds", type=int, default=seeds, help="at least two, for intervals (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(out), help="what is kept; a run that stands there is not made")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error(f"--seeds {given.seeds}: an interval needs at least two")
    return given


class Kept:
    """Runs by name in a JSON file: each is executed once, and written when it ends."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.runs: dict[str, Run] = {}
        settings = json.loads(json.dumps(settings))
        if path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != settings:
                raise SystemExit(
                    f"{path} keeps runs of {found['settings']}; these are of {settings}: give another --out"
                )
            self.runs = found["runs"]
        self.data = {"settings": settings, "machine": environment(), "runs": self.runs}

    def run(self, name: str, make: Callable[[], Run]) -> Run:
        """The run of that name, read from the file or executed now."""
        if name not in self.runs:
            self.runs[name] = make()
            self.write()
            print(f"  {name}: {self.runs[name]}", flush=True)
        return self.runs[name]

    def write(self, **more: Any) -> None:
        """Write the runs, with conclusions."""
        self.data |= more
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def text(values: Sequence[float], form: str = ".3g") -> str:
    """The mean and its 95% interval over seeds (Student's t), as text."""
    found = paired(values)
    return f"{statistics.fmean(values):{form}} ({found.low:{form}} to {found.high:{form}})"


def difference(ours: Sequence[float], others: Sequence[float]) -> Interval:
    """The 95% interval of ours - others, paired by seed."""
    return paired([a - b for a, b in zip(ours, others, strict=True)])


def signed(found: Interval, less: str, more: str) -> str:
    """The word for an interval below zero, the word for one above, or "cannot tell"."""
    return less if found.high < 0 else more if found.low > 0 else "cannot tell"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@cache
def domains(context: int) -> dict[str, Corpus]:
    """Four kinds of text installed with halfstep[lab], each with a held-out part; bytes vary by installation."""
    site = Path(torch.__file__).parents[1]
    places = {
        "Python": f"{Path(statistics.__file__).parent}/*.py",
        "C++ headers": f"{site}/torch/include/c10/**/*.h",
        "Markdown": f"{site}/*.dist-info/METADATA",
        "font metrics": f"{site}/matplotlib/mpl-data/fonts/afm/*.afm",
    }
    return {name: load_corpus(path, context) for name, path in places.items()}


def windows(corpora: Iterable[Corpus], each: int, length: int, generator: torch.Generator) -> Tensor:
    """`each` windows at random positions of each corpus's training part, corpus by corpus: (windows, length)."""
    found = []
    for corpus in corpora:
        limit = len(corpus.train) - length + 1
        starts = torch.randint(0, limit, (each,), generator=generator, dtype=torch.int64, device="cpu")
        found.append(corpus.windows("train", starts, length))
    return torch.cat(found)


def held_out(corpus: Corpus, count: int, length: int) -> Tensor:
    """`count` windows spread evenly over the held-out part."""
    starts = torch.arange(count, dtype=torch.int64, device="cpu") * (len(corpus.held_out) - length) // count
    return corpus.windows("held_out", starts, length)


def compared(
    what: str, pairs: dict[str, tuple[Sequence[float], Sequence[float]]], less: str, more: str
) -> dict[str, dict[str, Any]]:
    """By name, the 95% interval of ours - others, paired by seed, and its verdict, which are also printed."""
    print(f"\n{what}, 95% intervals:")
    found = {}
    for name, (ours, others) in pairs.items():
        each = difference(ours, others)
        found[name] = {"mean": statistics.fmean(ours) - statistics.fmean(others), "low": each.low, "high": each.high}
        found[name]["verdict"] = signed(each, less, more)
        print(f"  {name}: {found[name]['mean']:+.3f} ({each.low:+.3f} to {each.high:+.3f}), {found[name]['verdict']}")
    return found


def update(scaler: Any, optimizer: Any, loss: Tensor, most: float = 1.0) -> None:
    """One step of a prepared optimizer, with gradients clipped to a norm of at most `most`."""
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, most)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def in_codes(model: Any, weight: Quantizer, compute: str = "fp32") -> Any:
    """A copy in evaluation mode whose linear layers, except the output head, store their weights as codes."""
    twin, rules = copy.deepcopy(model).eval(), (*KEEP, Rule("*", linear_spec(None, weight, None)))
    halfstep.quantize_model(twin, Recipe("in-codes", "", "", compute=compute, rules=rules))
    return twin
