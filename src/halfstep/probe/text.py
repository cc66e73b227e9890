"""A probe's report in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from halfstep.probe.ranges import Counts, Range
from halfstep.probe.trial import OUTPUT_ERROR, Trial


if TYPE_CHECKING:
    from halfstep.probe.report import ProbeReport

COLUMNS = ("largest", "bits left", "beyond", "subnormal", "vanish", "error", "tensor")


def describe(report: ProbeReport) -> str:
    """The verdict, what it rests on, and its limits; one statement a line."""
    format = report.target.format.name
    word = "safe" if report.safe else "UNSAFE"
    lines = [f"{word}: {report.conditions.model} in {format}, forward and backward"]
    lines.append(f"{format} here: {report.trial.recipe.summary}")
    if report.first_failure is not None:
        lines.append(f"first to fail: {report.first_failure}")
    lines += _forward(report)
    lines.append(_backward(report))
    lines += [f"run for real: {outcome(report.trial)}"]
    lines += _suggested(report)
    return "\n".join([*lines, *_limits(report)])


def _forward(report: ProbeReport) -> list[str]:
    near = report.headroom
    if near is None:
        return []
    format = report.target.format
    tail = f"of {format.name}'s {format.max:g}"
    left = f"{near.headroom:.1f} bits left" if near.headroom >= 0 else f"{-near.headroom:.1f} bits beyond"
    lines = [f"forward: largest {near.counts.largest:.6g} {tail}, {left}: {near.site}"]
    lines += [f"  does not fit: {found.site}: {_why(found)}" for found in report.findings[:5]]
    return lines + [f"  and {len(report.findings) - 5} more"] * (len(report.findings) > 5)


def _why(found: Range) -> str:
    if found.counts.beyond and found.limits.overflows:
        return f"{found.share_beyond:.2g} of its values overflow, largest {found.counts.largest:.6g}"
    return f"{found.lost:.1%} of its magnitude vanishes or saturates"


def _backward(report: ProbeReport) -> str:
    window = report.window
    if math.isinf(window.largest):
        return "backward: all gradients are zero"
    low = "any small one" if window.smallest == 0 else power(window.smallest)
    over = f"from {power(2 * window.largest)} on {window.first_to_overflow} overflows"
    under = f"below {low} {window.first_to_vanish} vanishes" if window.first_to_vanish else "nothing vanishes"
    if window.empty:
        return f"backward: no loss scale works: {over}, {under}"
    verdict = "" if report.scale_found else "; none of them is one that the recipe uses"
    return f"backward: loss scales from {low} to {power(window.largest)} work: {over}, {under}{verdict}"


def outcome(trial: Trial) -> str:
    """How a trial went."""
    scale = trial.recipe.loss_scale
    at = f" at loss scale {trial.loss_scale:g}" if scale is not None and trial.loss_scale is not None else ""
    if trial.failure is not None:
        return f"{trial.recipe.name} fails: {trial.failure.site}: {trial.failure.what}"
    return f"{trial.recipe.name} passes: finite{at}, its output is off by {trial.output_error:.2g} from fp32"


def _suggested(report: ProbeReport) -> list[str]:
    if report.safe:
        return []
    passed = report.suggestion
    if passed is None:
        return [f"suggestion: none; {len(report.tried)} recipes were run and none passed"]
    kept = passed.recipe.float32_modules
    words = f", with {', '.join(kept)} in float32" if kept else ""
    base = passed.recipe.name.removesuffix("-kept")
    return [f"suggestion: {base}{words}; run for real: {outcome(passed)}"]


def _limits(report: ProbeReport) -> list[str]:
    held = report.conditions
    tokens = f", {held.tokens:,} tokens" if held.tokens is not None else ""
    steps = (
        f"before and after {held.train_steps} steps of AdamW at {held.learning_rate:g} in fp32"
        if held.train_steps
        else "0 training steps"
    )
    return [
        f"measured in fp32, evaluation mode: {held.data}; {held.batches} batches, "
        f"{held.examples} examples{tokens}; {steps}",
        f"loss sent back: {held.loss}",
        f"limits: other data, longer inputs or further training may reach further; an output off by {OUTPUT_ERROR:.0%} "
        "passes",
    ]


def rows(report: ProbeReport, count: int) -> list[tuple[str, ...]]:
    """The worst tensors, a row each, as `COLUMNS` says. One that several modules hand on is shown once."""
    distinct: dict[Counts, Range] = {}
    for found in report.worst():
        distinct.setdefault(found.counts, found)
    return [_row(found, report) for found in list(distinct.values())[:count]]


def _row(found: Range, report: ProbeReport) -> tuple[str, ...]:
    error = report.trial.errors.get(found.site.module) if found.site.role == "output" else None
    return (
        f"{found.counts.largest:.4g}",
        f"{found.headroom:.1f}",
        *map(_share, (found.share_beyond, found.share_subnormal, found.share_vanished)),
        "-" if error is None else f"{error:.2g}",
        str(found.site),
    )


def _share(value: float) -> str:
    return "-" if value == 0 else f"{value:.2g}" if value < 0.001 else f"{value:.1%}"


def power(value: float) -> str:
    """A power of two.

    >>> power(1024.0), power(0.5)
    ('2^10', '2^-1')
    """
    return f"2^{math.frexp(value)[1] - 1}"
