"""What was measured of a run that failed: what it lost, where, and since when. This file imports no torch.

What is measured need not be the cause, and is not called so: it is what the recipe did to its numbers that float32 does
not do to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfstep.lab.metrics import Row


ARRIVED = 0.9
"""Updates of which less arrives (descent quality), on average over the steps looked at, are a finding: on average,
since under stochastic rounding single steps scatter around 1."""
GONE = 0.1
"""Shares of values that vanish, and would not in float32, are findings from here on."""
NOTHING = (
    "no cause was found: its updates arrived, and no gradient or state became zero that fp32 keeps, at the steps "
    "looked at"
)
_HALF_LARGEST = 65504.0  # of float16
_NAMES = {"activation_gradients": "the activations' gradients", "gradients": "the weights' gradients"}

Counts = Mapping[str, Sequence[int]]
"""By tensor, how many values are zero, and of how many."""


@dataclass(frozen=True)
class Finding:
    """Something that left its range, or was lost, in words; `since` is the first step at which it was seen."""

    since: int
    share: float
    words: str


def explain(rows: Sequence[Row]) -> str:
    """A sentence on a run that degraded or diverged.

    Of several findings it gives the first, by the step at which they were first seen, then by their share; and then
    what was measured of the first tensor that was not finite.
    """
    found = [*_states(rows), *_gradients(rows), *_updates(rows)]
    first = min(found, key=lambda finding: (finding.since, -finding.share), default=None)
    parts = [first.words] if first else []
    parts += [_overflow(row) for row in rows if row["kind"] == "diverged" and "in_float32" in row]
    return "; ".join(parts) or NOTHING


def _updates(rows: Sequence[Row]) -> list[Finding]:
    """Updates that moved nothing, at the worst of the steps looked at. The last is left out where there are others: its
    learning rate is all but zero, and so are its updates."""
    looked = [row for row in _of(rows, "statistics") if row.get("descent", {}).get("quality") is not None]
    looked = looked[:-1] or looked
    if not looked or statistics.fmean(row["descent"]["quality"] for row in looked) >= ARRIVED:
        return []
    since = next(row["step"] for row in looked if row["descent"]["quality"] < ARRIVED)
    first, worst = looked[0], min(looked, key=lambda row: row["descent"]["quality"])
    layers = {n: v["quality"] for n, v in worst["descent"]["layers"].items() if v["quality"] is not None}
    where = min(layers, key=lambda name: layers[name])
    words = (
        f"{_share(worst['descent']['lost_share'])} of its updates changed no weight at step {worst['step']}"
        + (f", {_share(first['descent']['lost_share'])} at step {first['step']}" if first is not worst else "")
        + f"; {_share(worst['descent']['quality'])} of what they were to do arrived, least in {where} "
        f"({_share(layers[where])})"
    )
    return [Finding(since, worst["descent"]["lost_share"], words)]


def _states(rows: Sequence[Row]) -> list[Finding]:
    """States of the optimizer that are zero though the gradient they have just taken is not."""
    found, looked = [], _of(rows, "ranges")
    largest = {row["step"]: max(row["largest"].values(), default=0.0) for row in looked}
    for name in sorted({name for row in looked for states in row["states"].values() for name in states}):
        for row in looked:
            counts = {p: states[name] for p, states in row["states"].items() if name in states}
            zeros, of = _total(counts)
            if of and zeros / of >= GONE:
                where = max(counts, key=lambda p: counts[p][0])
                top = max((step for step in largest if step >= row["step"]), key=lambda step: largest[step])
                words = (
                    f"at step {row['step']}, {_share(zeros / of)} of {name} was zero where the gradient was not, most "
                    f"in {where}; updates came to {largest[top]:,.3g} times the learning rate at step {top}"
                )
                found.append(Finding(row["step"], zeros / of, words))
                break
    return found


def _gradients(rows: Sequence[Row]) -> list[Finding]:
    """Gradients that are zero, and are not in float32, of the same weights and batch."""
    found = []
    for kind, what in _NAMES.items():
        for row in _of(rows, "ranges"):
            own, plain = row[kind], row.get("in_float32", {}).get(kind, {})
            (zeros, of), (others, all_others) = _total(own), _total(plain)
            if of and all_others and zeros / of - others / all_others >= GONE:
                where = max(own, key=lambda name: own[name][0] - plain.get(name, own[name])[0])
                words = (
                    f"at step {row['step']}, {_share(zeros / of)} of {what} were zero, of the same weights in fp32 "
                    f"{_share(others / all_others)}; most of the others in {where}"
                )
                found.append(Finding(row["step"], zeros / of - others / all_others, words))
                break
    return found


def _overflow(row: Row) -> str:
    """What the first tensor that was not finite comes to in float32."""
    at, tensor = f"at step {row['step']}", row["tensor"]
    if row["in_float32"] is None:
        return f"{at} the {tensor} is not finite in fp32 either, from the same weights"
    is_beyond = row["compute"] == "fp16" and row["in_float32"] > _HALF_LARGEST
    beyond = ", beyond fp16's largest, 65,504" if is_beyond else ""
    return f"{at} the {tensor} comes to {row['in_float32']:.3g} in fp32, from the same weights{beyond}"


def _of(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _total(counts: Counts) -> tuple[int, int]:
    return sum(n for n, _ in counts.values()), sum(of for _, of in counts.values())


def _share(value: float) -> str:
    return f"{max(value, 0.0):.0%}" if value >= 0.01 or value <= 0 else f"{value:.1g}"
