"""The verdicts of docs/fp4.md: each case compared with fp32, and with the case of which it changes a part."""

from __future__ import annotations

import statistics
from typing import Any

from halfstep.lab.verdict import DIVERGED, MATCHES, UNDECIDED, Difference, difference


ENOUGH = 3
"""The fewest seeds for a verdict."""
MISSING = "not measured yet"
BETTER, WORSE, ALIKE = "better", "worse", "cannot tell"

Cases = dict[str, dict[str, Any]]


def judged(cases: Cases) -> dict[str, dict[str, Any]]:
    """By case: mean loss and verdict, and its differences to fp32 and to its base with their intervals.

    A case with a diverged run has no other figures. With fewer than three seeds the verdict is `cannot tell`. The
    difference to the base is `worse` where its whole interval is above 0, and `better` where it is below.
    """
    return {name: _judged(name, case, cases) for name, case in cases.items()}


def finals(case: dict[str, Any]) -> dict[int, float]:
    """The final losses of the runs that finished, by seed."""
    return {int(seed): run["loss"] for seed, run in case["runs"].items() if run["loss"] is not None}


def diverged(case: dict[str, Any]) -> dict[int, int]:
    """The steps at which runs diverged, by seed; the last validated step where only the final loss shows it."""
    lost = {int(seed): run for seed, run in case["runs"].items() if run["loss"] is None}
    return {seed: run["diverged_at"] or run["curve"][-1][0] for seed, run in lost.items()}


def _judged(name: str, case: dict[str, Any], cases: Cases) -> dict[str, Any]:
    own, fp32 = {} if diverged(case) else finals(case), finals(cases[case["baseline"]])
    to_fp32 = difference(own, fp32, same=name == case["baseline"])
    pairs = len(own.keys() & fp32.keys())
    status = to_fp32.status if pairs >= ENOUGH else UNDECIDED if pairs else MISSING
    found: dict[str, Any] = {
        "loss": statistics.fmean(own.values()) if own else None,
        "seeds": len(case["runs"]),
        "status": DIVERGED if diverged(case) else MATCHES if name == case["baseline"] and own else status,
        "to_fp32": _ends(to_fp32),
        "seeds_to_decide": to_fp32.seeds_to_decide if pairs >= ENOUGH else None,
    }
    if case["base"] is not None:
        base = finals(cases[case["base"]])
        gap = _ends(difference(own, base, same=own == base))
        few = len(own.keys() & base.keys()) < ENOUGH or gap["low"] is None
        word = ALIKE if few else WORSE if gap["low"] > 0 else BETTER if gap["high"] < 0 else ALIKE
        found["to_base"] = gap | {"status": WORSE if diverged(case) and not diverged(cases[case["base"]]) else word}
    return found


def _ends(gap: Difference) -> dict[str, Any]:
    ends = gap.interval
    return {"gap": gap.gap, "low": ends and ends.low, "high": ends and ends.high}
