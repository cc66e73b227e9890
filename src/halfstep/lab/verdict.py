"""Does a recipe match fp32? The rule, on what the runs wrote down. This file imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.lab.facts import Metric
from halfstep.lab.metrics import Row


MATCHES, DEGRADES, DIVERGED, UNMEASURED = "matches", "degrades", "diverged", "band not measured"
MIN_BASELINES = 3
TOLERANCE = 0.005


def rule(metric: Metric | None = None) -> str:
    """The rule in words: by the loss, or by the metric where that judges."""
    judges = metric is not None and metric.judges
    what, better = "loss", "below"
    if metric is not None and judges:
        what, better = metric.name, "above" if metric.higher_is_better else "below"
    worse = "below" if better == "above" else "above"
    values = what if judges else "validation losses"
    return (
        f"fp32's band is the mean of its final {values} over at least {MIN_BASELINES} seeds, plus or minus the "
        f"larger of two standard deviations and {TOLERANCE:.1%}. A recipe whose mean final {what} is inside it or "
        f"{better} matches; {worse} it, it degrades; a run that ends in infinities or NaN has diverged."
    )


@dataclass(frozen=True)
class Band:
    """fp32's final loss (or the metric that judges) and how far other seeds of it lie."""

    mean: float
    half_width: float
    seeds: int

    @property
    def upper(self) -> float:
        """The band's upper end."""
        return self.mean + self.half_width

    @property
    def lower(self) -> float:
        """The band's lower end."""
        return self.mean - self.half_width


@dataclass(frozen=True)
class RecipeVerdict:
    """How one recipe did beside fp32."""

    recipe: str
    status: str
    seeds: int
    final_loss: float | None
    gap: float | None
    """(final loss - fp32's mean) / fp32's mean; of the metric where that judges. Positive is worse."""
    paired_gap: float | None
    """The mean over seeds of (final - fp32's with the same seed) / fp32's: the same weights, the same batches."""
    diverged_at: int | None
    first_nonfinite: str | None
    reason: str | None
    ms_per_step: float | None
    tokens_per_second: float | None
    skipped_steps: int
    bytes_per_parameter: dict[str, float] | None
    final_metric: float | None = None
    """The mean over seeds of the metric after the last step, where the task has one."""

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def band(finals: Sequence[float]) -> Band | None:
    """fp32's band from its final losses, None with fewer than three."""
    if len(finals) < MIN_BASELINES:
        return None
    mean = statistics.fmean(finals)
    return Band(mean, max(2 * statistics.stdev(finals), TOLERANCE * mean), len(finals))


def final_loss(rows: Sequence[Row]) -> float | None:
    """The validation loss after the last step; None for a run that did not finish or diverged."""
    return _final(rows, "loss")


def final_metric(rows: Sequence[Row]) -> float | None:
    """The metric after the last step; None where there is none, or for a run that did not finish or diverged."""
    return _final(rows, "metric")


def final_value(rows: Sequence[Row], metric: Metric | None = None) -> float | None:
    """What the verdict is about: the metric where it judges, else the loss."""
    return final_metric(rows) if metric is not None and metric.judges else final_loss(rows)


def _final(rows: Sequence[Row], name: str) -> float | None:
    if not rows or rows[-1]["kind"] != "end" or rows[-1]["status"] != "finished":
        return None
    values = [row.get(name) for row in rows if row["kind"] == "validation"]
    return values[-1] if values else None


def _divergence(rows: Sequence[Row]) -> Row | None:
    """The row that says how a run diverged, made up where only the validation after the last update shows it."""
    for row in rows:
        if row["kind"] == "diverged":
            return row
    last = next((row for row in reversed(rows) if row["kind"] == "validation"), None)
    if last and last["loss"] is None and rows[-1]["kind"] == "end":
        reason = "the final validation loss is infinite or NaN"
        return {"kind": "diverged", "step": last["step"], "reason": reason, "tensor": None}
    return None


def timings(runs: Iterable[Sequence[Row]]) -> list[float]:
    """The seconds of the steps of a recipe's runs, except each run's first step, which warms up.

    A baseline taken from an earlier experiment has none: it ran at another time, beside other work.
    """
    steps = [row for rows in runs for row in rows if row["kind"] == "step" and row["seconds"] is not None]
    return [row["seconds"] for row in steps if row["step"] > 1] or [row["seconds"] for row in steps]


def judge(
    recipe: str, runs: Mapping[int, Sequence[Row]], baselines: Mapping[int, float], metric: Metric | None = None
) -> RecipeVerdict:
    """The verdict on a recipe from its runs by seed, against fp32's final values by seed.

    The values are losses, or those of a metric that judges.
    """
    fp32 = band(list(baselines.values()))
    finals = {seed: value for seed, rows in runs.items() if (value := final_value(rows, metric)) is not None}
    bad = next((row for rows in runs.values() if (row := _divergence(rows))), None)
    mean = statistics.fmean(finals.values()) if finals and not bad else None
    worse = -1 if metric is not None and metric.judges and metric.higher_is_better else 1
    pairs = [worse * (value - baselines[seed]) / baselines[seed] for seed, value in finals.items() if seed in baselines]
    if bad:
        status = DIVERGED
    elif mean is None:
        status = "not finished"
    elif fp32 is None:
        status = UNMEASURED
    else:
        status = MATCHES if worse * (mean - fp32.mean) <= fp32.half_width else DEGRADES
    steps = [row for rows in runs.values() for row in rows if row["kind"] == "step"]
    seconds = timings(runs.values())
    median = statistics.median(seconds) if seconds else None
    memory = next((row["bytes"] for rows in runs.values() for row in rows if row["kind"] == "memory"), None)
    return RecipeVerdict(
        recipe=recipe,
        status=status,
        seeds=len(runs),
        final_loss=None if bad else _mean(final_loss(rows) for rows in runs.values()),
        gap=worse * (mean - fp32.mean) / fp32.mean if fp32 and mean is not None else None,
        paired_gap=statistics.fmean(pairs) if pairs and not bad else None,
        diverged_at=bad["step"] if bad else None,
        first_nonfinite=bad["tensor"] if bad else None,
        reason=bad["reason"] if bad else None,
        ms_per_step=None if median is None else 1000 * median,
        tokens_per_second=None if not median else steps[0]["tokens"] / median,
        skipped_steps=sum(bool(row["skipped"]) for row in steps),
        bytes_per_parameter=memory,
        final_metric=None if bad else _mean(final_metric(rows) for rows in runs.values()),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None
