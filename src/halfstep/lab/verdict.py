"""Does a recipe match fp32? The rule, applied to recorded runs, and the measurements of a run that failed. No torch.

A measurement need not be the cause, and is not called so: it is what the recipe did to its values that float32 does not
do to them.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.lab.experiment import Experiment, Metric, Row
from halfstep.lab.interval import LEVEL, Interval, borrowed, borrowed_spread, paired, pairs_to_decide


ARRIVED = 0.9
"""An average descent quality below this, over the recorded steps, is a finding. (Single steps scatter around 1 under
stochastic rounding.)"""
GONE = 0.1
"""From this share on, values that vanish, and would not in float32, are a finding."""
NOTHING = (
    "no cause was found: its updates arrived, and no gradient or state became zero that fp32 keeps, at the steps "
    "looked at"
)
_NAMES = {"activation_gradients": "the activations' gradients", "gradients": "the weights' gradients"}

Counts = Mapping[str, Sequence[int]]
"""By tensor: the number of zeros, and of elements."""


@dataclass(frozen=True)
class Finding:
    """Something that left its range, or was lost, in words; `since` is the first step at which it was seen."""

    since: int
    share: float
    words: str


def explain(rows: Sequence[Row]) -> str:
    """A sentence on a run that degraded or diverged.

    Of several findings it gives the earliest, and of these the one with the largest share; then the measurement of the
    first non-finite tensor.
    """
    found = [*_states(rows), *_gradients(rows), *_updates(rows)]
    first = min(found, key=lambda finding: (finding.since, -finding.share), default=None)
    parts = [first.words] if first else []
    parts += [_overflow(row) for row in rows if row["kind"] == "diverged" and "in_float32" in row]
    return "; ".join(parts) or NOTHING


def _updates(rows: Sequence[Row]) -> list[Finding]:
    """Updates that changed nothing, at the worst of the recorded steps. The last step is left out if there are others:
    its learning rate, and so its updates, are almost zero."""
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


def _states(rows: Sequence[Row]) -> Iterator[Finding]:
    """States of the optimizer that are zero although the gradient they have just received is not."""
    looked = _of(rows, "ranges")
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
                yield Finding(row["step"], zeros / of, words)
                break


def _gradients(rows: Sequence[Row]) -> Iterator[Finding]:
    """Gradients that are zero, but not in float32 with the same weights and batch."""
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
                yield Finding(row["step"], zeros / of - others / all_others, words)
                break


def _overflow(row: Row) -> str:
    """The float32 magnitude of the first non-finite tensor, in words."""
    at, tensor = f"at step {row['step']}", row["tensor"]
    if row["in_float32"] is None:
        return f"{at} the {tensor} is not finite in fp32 either, from the same weights"
    words = ", beyond fp16's largest, 65,504" if row["compute"] == "fp16" and row["in_float32"] > 65504.0 else ""
    return f"{at} the {tensor} comes to {row['in_float32']:.3g} in fp32, from the same weights{words}"


def _of(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _total(counts: Counts) -> tuple[int, int]:
    return sum(n for n, _ in counts.values()), sum(of for _, of in counts.values())


def _share(value: float) -> str:
    return f"{max(value, 0.0):.0%}" if value >= 0.01 or value <= 0 else f"{value:.1g}"


MATCHES, DEGRADES, UNDECIDED, DIVERGED = "matches", "degrades", "cannot tell", "diverged"
UNFINISHED, UNMEASURED = "not finished", "not compared"
MARGIN = Experiment.margin
"""1%: MLPerf's inference benchmark asks a network in few bits for 99% of fp32's quality (Reddi et al. 2019, arXiv
1911.02549)."""


def rule(metric: Metric | None = None, margin: float = MARGIN) -> str:
    """The rule in words: by the loss, or by the metric if that judges."""
    what = f"final {metric.name}" if metric is not None and metric.judges else "final validation loss"
    return (
        "Each seed gives a pair: fp32 and the recipe, from the same initial weights and on the same batches. The "
        f"differences of their {what}, relative to fp32's mean, have a {LEVEL:.0%} confidence interval (Student's t). "
        f"A recipe matches if the whole interval lies below a loss of {100 * margin:.3g}%, and degrades if all of it "
        "lies above; if the margin lies inside it, these seeds cannot tell. Differences without a spread, as with one "
        "seed, use fp32's spread from seed to seed, times the square root of two. A run that ends in infinities or "
        "NaN has diverged."
    )


@dataclass(frozen=True)
class Band:
    """fp32's final losses (or metrics, if those judge): their mean, and the spread over seeds."""

    mean: float
    half_width: float
    """Two standard deviations."""
    seeds: int


@dataclass(frozen=True)
class Difference:
    """A recipe's final values relative to fp32's; positive is worse."""

    status: str
    gap: float | None
    """The mean over the seeds that both finished."""
    interval: Interval | None
    """None if neither has a second seed."""
    seeds_to_decide: int | None = None
    """How many seeds would decide an undecided verdict, if mean and spread stay the same; None if no number would."""


@dataclass(frozen=True)
class RecipeVerdict:
    """The verdict on one recipe relative to fp32."""

    recipe: str
    status: str
    seeds: int
    finals: Mapping[int, float]
    """By seed, for finished runs: the loss after the last step, or the metric if that judges."""
    final_loss: float | None
    """The mean over seeds."""
    final_metric: float | None
    """The mean over seeds of the metric after the last step, if the task has one."""
    paired_gap: float | None
    """The mean over seeds of final - fp32's with the same seed, relative to the mean of fp32's; positive is worse."""
    interval: Interval | None
    """The interval of `paired_gap`; None if neither has a second seed."""
    seeds_to_decide: int | None
    diverged_at: int | None
    first_nonfinite: str | None
    reason: str | None
    ms_per_step: float | None
    tokens_per_second: float | None
    skipped_steps: int
    bytes_per_parameter: dict[str, float] | None
    explanation: str | None
    """The measurements of a run that diverged, or that is significantly worse than fp32 and does not match."""

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON data."""
        return {**asdict(self), "finals": {str(seed): value for seed, value in self.finals.items()}}


def band(finals: Sequence[float]) -> Band | None:
    """fp32's band from its final losses, None with fewer than two."""
    return Band(statistics.fmean(finals), 2 * statistics.stdev(finals), len(finals)) if len(finals) > 1 else None


def difference(
    finals: Mapping[int, float],
    baselines: Mapping[int, float],
    higher_is_better: bool = False,
    margin: float = MARGIN,
    same: bool = False,
) -> Difference:
    """Final values by seed against fp32's, by the rule that `rule` describes.

    Both ends of the interval are tested, so a recipe that loses exactly the margin is called a match in at most 2.5% of
    comparisons, and degraded in at most 2.5%. That holds for one recipe and seeds chosen beforehand; adding seeds until
    the verdict pleases makes errors more frequent.

    Args:
        same: whether the recipe's runs equal fp32's, value by value: then no other seed can differ.
    """
    worse = -1 if higher_is_better else 1
    seeds = sorted(finals.keys() & baselines.keys())
    # One scale for all pairs: a seed whose value is close to zero would outweigh the others.
    scale = abs(statistics.fmean(baselines[seed] for seed in seeds)) if seeds else 0.0
    if not scale:  # no shared seed, or a mean of zero
        return Difference(UNMEASURED, None, None)
    pairs = [worse * (finals[seed] - baselines[seed]) / scale for seed in seeds]
    gap, varied = statistics.fmean(pairs), len(set(pairs)) > 1
    others = [value / scale for value in baselines.values()]
    if same:
        interval, spread = Interval(gap, gap), 0.0
    elif varied:
        interval, spread = paired(pairs), statistics.stdev(pairs)
    elif len(others) > 1:
        interval, spread = borrowed(pairs, others), borrowed_spread(others)
    else:
        return Difference(UNDECIDED, gap, None)
    if interval.high < margin:
        return Difference(MATCHES, gap, interval)
    if interval.low > margin:
        return Difference(DEGRADES, gap, interval)
    return Difference(UNDECIDED, gap, interval, pairs_to_decide(gap, spread, margin))


def final_values(runs: Mapping[int, Sequence[Row]], metric: Metric | None = None) -> dict[int, float]:
    """By seed, for finished runs: the final metric if it judges, else the final loss."""
    name = "metric" if metric is not None and metric.judges else "loss"
    return {seed: value for seed, rows in runs.items() if (value := final(rows, name)) is not None}


def final(rows: Sequence[Row], name: str = "loss") -> float | None:
    """The validation loss, or the metric, after the last step; None for a run that did not finish or diverged."""
    if not rows or rows[-1]["kind"] != "end" or rows[-1]["status"] != "finished":
        return None
    values = [row.get(name) for row in rows if row["kind"] == "validation"]
    return values[-1] if values else None


def _divergence(rows: Sequence[Row]) -> Row | None:
    """The row that records a run's divergence; constructed if only the validation after the last update shows it."""
    for row in rows:
        if row["kind"] == "diverged":
            return row
    last = next((row for row in reversed(rows) if row["kind"] == "validation"), None)
    if last and last["loss"] is None and rows[-1]["kind"] == "end":
        reason = "the final validation loss is infinite or NaN"
        return {"kind": "diverged", "step": last["step"], "reason": reason, "tensor": None}
    return None


def enough(interval: object, seeds_to_decide: int | None) -> str:
    """The number of seeds that would decide, in words."""
    if interval is None:
        return "it takes two seeds to see how far seeds differ"
    if seeds_to_decide is None:
        return "it takes more than 1,000 seeds to decide"
    return f"about {seeds_to_decide:,} seeds would decide"


def timings(runs: Iterable[Sequence[Row]]) -> list[float]:
    """The seconds of the steps of a recipe's runs, except each run's first step, which warms up.

    A baseline copied from an earlier experiment has none: it ran at another time, with other load.
    """
    steps = [row for rows in runs for row in rows if row["kind"] == "step" and row["seconds"] is not None]
    return [row["seconds"] for row in steps if row["step"] > 1] or [row["seconds"] for row in steps]


def judge(
    recipe: str,
    runs: Mapping[int, Sequence[Row]],
    fp32: Mapping[int, Sequence[Row]],
    metric: Metric | None = None,
    margin: float = MARGIN,
) -> RecipeVerdict:
    """The verdict on a recipe from its runs by seed, against fp32's.

    The loss is compared, or a metric that judges.
    """
    finals, baselines = final_values(runs, metric), final_values(fp32, metric)
    bad = next((row for rows in runs.values() if (row := _divergence(rows))), None)
    by_metric = metric is not None and metric.judges
    same = all(_numbers(runs[seed]) == _numbers(fp32[seed]) for seed in finals.keys() & baselines.keys())
    compared = difference(
        {} if bad else finals, baselines, metric is not None and by_metric and metric.higher_is_better, margin, same
    )
    status = DIVERGED if bad else compared.status if finals else UNFINISHED
    steps = [row for rows in runs.values() for row in rows if row["kind"] == "step"]
    seconds = timings(runs.values())
    median = statistics.median(seconds) if seconds else None
    memory = next((row["bytes"] for rows in runs.values() for row in rows if row["kind"] == "memory"), None)
    seed = next((seed for seed, rows in runs.items() if _divergence(rows)), min(runs, default=0))
    return RecipeVerdict(
        recipe=recipe,
        status=status,
        seeds=len(runs),
        finals=finals,
        final_loss=None if bad else _mean(final(rows) for rows in runs.values()),
        final_metric=None if bad else _mean(final(rows, "metric") for rows in runs.values()),
        paired_gap=compared.gap,
        interval=compared.interval,
        seeds_to_decide=compared.seeds_to_decide,
        diverged_at=bad["step"] if bad else None,
        first_nonfinite=bad["tensor"] if bad else None,
        reason=bad["reason"] if bad else None,
        ms_per_step=None if median is None else 1000 * median,
        tokens_per_second=None if not median else steps[0]["tokens"] / median,
        skipped_steps=sum(bool(row["skipped"]) for row in steps),
        bytes_per_parameter=memory,
        explanation=explain(runs[seed]) if _is_worse(status, compared.interval) else None,
    )


def _is_worse(status: str, interval: Interval | None) -> bool:
    """Whether a recipe is significantly worse than fp32, by more than the margin or not, and does not match."""
    return status == DIVERGED or (status != MATCHES and interval is not None and interval.low > 0)


def _numbers(rows: Sequence[Row]) -> list[tuple[float | None, float | None]]:
    return [(row["loss"], row.get("metric")) for row in rows if row["kind"] in ("step", "validation")]


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None
