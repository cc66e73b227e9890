"""The sections of docs/fp8.md from results of `ledger.py window` and `outliers.py`: constant scales, and outliers."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator
from typing import Any

from harness import RESULTS


WITHIN = 0.005
"""A constant is inside the window if no seed's loss exceeds fp16's with the same seed by more than this share."""

WINDOW = """## One scale for all

Perez et al. 2023 (arXiv 2309.17224) scale every weight, activation and gradient by the same constant 2^c. They find
that the window of c that works narrows as models grow. `python benchmarks/ledger.py window` trains two GPTs, of 1 layer
of width 32 and of 3 layers of width 128, under `fp8-amax` and under `fp8-cscale` with c swept; the baseline is the
same recipe in fp16, without FP8.

| model | fp8-amax | {constants} | window |
| --- | --- | {rule} | --- |"""
OUTLIERS = """## Outliers of a gated product, with Smooth-SwiGLU and without

Fishman et al. 2025 (arXiv 2409.12517) find that SwiGLU's outliers grow over hundreds of billions of tokens until FP8
with delayed scales diverges, and that Smooth-SwiGLU prevents this. These runs are too short for such growth, so
`python benchmarks/outliers.py` starts with the outliers: a small gated MLP learns from one whose two input weights
are aligned, on tokens of log-normal sizes. Only its down-projection is in FP8, as in `fp8-smooth-swiglu`, scaled
by the amax of the previous step.

| tail of the tokens' sizes | weight decay | outlier | jump | loss over bf16's, without | with Smooth-SwiGLU |
| --- | --- | --- | --- | --- | --- |"""


def sections() -> str:
    """Both sections, from the stored results."""
    window, outliers = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("ledger_window", "outliers"))
    return "\n".join([*constants(window), "", *smooth(outliers)])


def constants(data: dict[str, Any]) -> Iterator[str]:
    """The section on constant scales, with a table row per model."""
    names = [name for name in next(iter(data["comparisons"].values()))["summary"] if name.startswith("c")]
    yield WINDOW.format(constants=" | ".join(f"c = {int(n[1:])}" for n in names), rule=" | ".join("---" for _ in names))
    for label, found in data["comparisons"].items():
        rows = found["summary"]
        inside = [int(name[1:]) for name in names if rows[name]["most"] is not None and rows[name]["most"] <= WITHIN]
        cells = " | ".join(_gap(rows[name]) for name in ("fp8-amax", *names))
        yield f"| {label} | {cells} | {f'{min(inside)} to {max(inside)}' if inside else 'none'} |"
    ends = ", ".join(
        f"{label} {_gap(found['summary'][names[0]])} and {_gap(found['summary'][names[-1]])}"
        for label, found in data["comparisons"].items()
    )
    experiment = next(iter(data["comparisons"].values()))["experiment"]
    yield from _wrapped(
        f"A figure is the loss relative to fp16's with the same seed, the mean over {experiment['seeds']} seeds, after "
        f"{experiment['steps']} steps. A constant is in the window where no seed is more than {WITHIN:.1%} above fp16. "
        f"A narrower window has larger losses at its ends: {ends}."
    )


def smooth(data: dict[str, Any]) -> Iterator[str]:
    """The section on outliers, with a table row per setting."""
    yield OUTLIERS
    for row in data["rows"]:
        cells = (
            f"{row[n]['ratio']:.2f} ({row[n]['least']:.2f} to {row[n]['most']:.2f})" for n in ("without", "smooth")
        )
        yield f"| {row['tail']:g} | {row['decay']:g} | {row['outlier']:.0f} | {row['jump']:.1f} | {' | '.join(cells)} |"
    rows = data["rows"]
    pairs = [
        (plain["loss"], smoothed["loss"])
        for row in rows
        for plain, smoothed in zip(row["runs"]["without"], row["runs"]["smooth"], strict=True)
    ]
    better = sum(smoothed < plain for plain, smoothed in pairs)
    diverged = sum(not math.isfinite(loss) for pair in pairs for loss in pair)
    yield from _wrapped(
        f"Means over {data['seeds']} seeds of {data['steps']} steps, with the minimum and the maximum. An outlier "
        "is the largest value of the gated product over its root mean square; a jump is its largest value over that of "
        "the previous step. Both are maxima over bf16's runs, jumps over their second half. In "
        f"{better} of {len(pairs)} pairs of runs with the same setting and seed Smooth-SwiGLU has the lower loss. "
        f"{diverged} of the {2 * len(pairs)} runs diverged."
    )


def _gap(row: dict[str, Any]) -> str:
    return "diverged" if row["diverged"] else f"{row['gap']:+.2%}"


def _wrapped(text: str) -> list[str]:
    return ["", *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)]
