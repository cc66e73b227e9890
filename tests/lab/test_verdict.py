"""Edge cases of verdicts: matches, degrades, diverged, or cannot tell."""

import dataclasses
import statistics

import pytest

from halfstep.lab.experiment import Metric
from halfstep.lab.interval import Interval
from halfstep.lab.verdict import (
    DEGRADES,
    DIVERGED,
    MATCHES,
    UNDECIDED,
    UNFINISHED,
    UNMEASURED,
    band,
    difference,
    enough,
    final,
    final_values,
    judge,
    rule,
)


WIDE = {0: 1.9, 1: 2.0, 2: 2.1}


def step(number, seconds=0.1, skipped=False):
    return {"kind": "step", "step": number, "loss": 2.5, "skipped": skipped, "seconds": seconds, "tokens": 1000}


def finished(loss, steps=3):
    validations = [{"kind": "validation", "step": 0, "loss": 5.5}, {"kind": "validation", "step": steps, "loss": loss}]
    end = {"kind": "end", "step": steps, "status": "finished"}
    return [validations[0], *[step(n) for n in range(1, steps + 1)], validations[1], end]


def diverged(at=2, tensor="head.weight (gradient)"):
    return [
        *[step(n) for n in range(1, at)],
        {"kind": "diverged", "step": at, "reason": "the loss is NaN", "tensor": tensor},
        {"kind": "end", "step": at, "status": "diverged"},
    ]


def fp32(finals=WIDE):
    return {seed: finished(loss) for seed, loss in finals.items()}


def worse_by(*gaps):
    """Runs whose losses exceed fp32's by these relative gaps, seed by seed."""
    return {seed: finished(WIDE[seed] * (1 + gap)) for seed, gap in enumerate(gaps)}


def test_band_is_two_standard_deviations():
    found = band(list(WIDE.values()))
    assert found.half_width == 2 * statistics.stdev(WIDE.values())
    assert (found.mean, found.seeds) == (pytest.approx(2.0), 3)
    assert band([2.0]) is None
    assert band([]) is None


@pytest.mark.parametrize(
    ("gaps", "status"),
    [
        ((0.001, 0.002, 0.003), MATCHES),
        ((-0.2, -0.21, -0.19), MATCHES),  # better than fp32 is not degraded
        ((0.018, 0.019, 0.020), DEGRADES),
        ((0.001, 0.002, 0.03), UNDECIDED),
        ((0.009, 0.010, 0.011), UNDECIDED),
        ((0.005, 0.006), UNDECIDED),  # two seeds: 0.55% +- 0.64%
        ((0.0050, 0.0051), MATCHES),
    ],
)
def test_verdict_is_decided_by_the_whole_paired_interval(gaps, status):
    verdict = judge("r", worse_by(*gaps), fp32())
    wanted = statistics.fmean(WIDE[seed] * gap for seed, gap in enumerate(gaps))
    assert verdict.status == status
    assert verdict.paired_gap == pytest.approx(wanted / statistics.fmean(WIDE[seed] for seed in range(len(gaps))))
    assert verdict.interval.low < verdict.paired_gap < verdict.interval.high
    assert verdict.seeds_to_decide is None or (status == UNDECIDED and verdict.seeds_to_decide > len(gaps))


def test_verdict_uses_the_given_margin():
    runs = worse_by(0.018, 0.019, 0.020)
    assert judge("r", runs, fp32(), margin=0.01).status == DEGRADES
    assert judge("r", runs, fp32(), margin=0.05).status == MATCHES


def test_single_seed_uses_the_spread_of_fp32():
    """With fp32's spread of 5%, one seed cannot tell 1%; with 0.01% it can."""
    one = judge("r", worse_by(0.001), fp32())
    assert (one.status, one.paired_gap) == (UNDECIDED, pytest.approx(0.001))
    assert one.interval.high - one.paired_gap == pytest.approx(4.3027 * 2**0.5 * 0.1 / 1.9, rel=1e-4)
    assert one.seeds_to_decide > 100
    narrow = {0: 2.0, 1: 2.0002, 2: 1.9998}
    assert judge("r", {0: finished(2.004)}, fp32(narrow)).status == MATCHES
    assert judge("r", {0: finished(2.04)}, fp32(narrow)).status == DEGRADES


def test_runs_identical_to_fp32_match_with_any_number_of_seeds():
    same = judge("r", {0: finished(1.9)}, {0: finished(1.9)})
    assert (same.status, same.interval) == (MATCHES, Interval(0.0, 0.0))
    metric = Metric("accuracy", True, 1.0, judges=True)

    def scored(loss):
        return [dict(row, metric=0.9) if row["kind"] == "validation" else row for row in finished(loss)]

    other = judge("r", {0: scored(1.8)}, {0: scored(1.9)}, metric)
    assert (other.status, other.paired_gap, other.interval) == (UNDECIDED, 0.0, None)  # equal by chance, not identical
    assert judge("r", {0: scored(1.9)}, {0: scored(1.9)}, metric).status == MATCHES


def test_equal_differences_use_the_spread_of_fp32():
    """For a metric of few values, equal differences say little about their spread."""
    found = difference({0: 0.9, 1: 0.8, 2: 0.7}, {0: 0.9, 1: 0.8, 2: 0.7}, higher_is_better=True)
    assert (found.status, found.gap) == (UNDECIDED, 0.0)
    assert found.interval.high == pytest.approx(4.3027 * 2**0.5 * 0.125 / 3**0.5, rel=1e-4)


def test_two_single_seeds_are_undecided_with_a_reason():
    verdict = judge("r", {0: finished(9.0)}, {0: finished(2.0)})
    assert (verdict.status, verdict.paired_gap, verdict.interval) == (UNDECIDED, 3.5, None)
    assert enough(None, None) == "it takes two seeds to see how far seeds differ"
    assert enough(Interval(0, 1), 1234) == "about 1,234 seeds would decide"
    assert "it takes more than 1,000 seeds" in enough(Interval(0, 1), None)


@pytest.mark.parametrize("baselines", [{}, {5: 2.0, 6: 2.0}, {0: 0.0, 1: 0.0}], ids=["none", "others", "zero"])
def test_verdict_without_pairs_is_unmeasured(baselines):
    verdict = judge("r", {0: finished(9.0), 1: finished(8.0)}, fp32(baselines))
    assert (verdict.status, verdict.paired_gap, verdict.interval) == (UNMEASURED, None, None)


def test_seed_with_a_loss_near_zero_does_not_dominate():
    """Worse by 0.004 to 0.006 with every seed, while fp32 ends between 0.0003 and 0.006."""
    fp32s = {0: 0.0057, 1: 0.0050, 2: 0.0048, 3: 0.0003}
    found = difference({0: 0.0107, 1: 0.0091, 2: 0.0100, 3: 0.0061}, fp32s)
    assert (found.status, found.gap) == (DEGRADES, pytest.approx(0.005025 / 0.00395))


def test_negative_losses_degrade_when_they_rise():
    verdict = difference({0: -1.9, 1: -1.91}, {0: -2.0, 1: -2.0})
    assert (verdict.status, verdict.gap) == (DEGRADES, pytest.approx(0.0475))


def test_unpaired_seed_is_left_out_of_the_gap():
    verdict = judge("r", {2: finished(2.2), 7: finished(2.0)}, fp32())
    assert verdict.final_loss == pytest.approx(2.1)
    assert verdict.paired_gap == pytest.approx((2.2 - 2.1) / 2.1)
    assert (verdict.seeds, verdict.finals) == (2, {2: 2.2, 7: 2.0})


def test_one_diverged_seed_makes_the_recipe_diverged():
    verdict = judge("r", {0: finished(2.0), 1: diverged(at=2)}, fp32())
    assert (verdict.status, verdict.diverged_at, verdict.first_nonfinite) == (DIVERGED, 2, "head.weight (gradient)")
    assert verdict.reason == "the loss is NaN"
    assert (verdict.final_loss, verdict.paired_gap, verdict.interval) == (None, None, None)


def test_diverged_outranks_a_missing_baseline():
    assert judge("r", {0: diverged(at=1, tensor=None)}, {}).status == DIVERGED


def test_divergence_at_the_last_update_is_found():
    """The last update is only seen by the following validation, which writes null."""
    verdict = judge("r", {0: finished(None)}, fp32())
    assert (verdict.status, verdict.diverged_at, verdict.first_nonfinite) == (DIVERGED, 3, None)
    assert "validation" in verdict.reason


@pytest.mark.parametrize("rows", [[], finished(2.0)[:1], finished(2.0)[:-1]], ids=["empty", "begun", "no end"])
def test_killed_run_is_unfinished(rows):
    assert final(rows) is None
    assert judge("r", {0: rows}, fp32()).status == UNFINISHED


def test_recipe_is_judged_on_finished_seeds():
    verdict = judge("r", {0: finished(2.0), 1: finished(9.0)[:-1]}, fp32(dict.fromkeys(range(3), 2.0)))
    assert (verdict.status, verdict.final_loss) == (MATCHES, 2.0)


def test_times_are_medians_without_the_first_step():
    rows = [step(1, 9.0), step(2, 0.1), step(3, 0.2, skipped=True), step(4, 0.3, skipped=True)]
    verdict = judge("r", {0: rows}, {})
    assert (verdict.ms_per_step, verdict.tokens_per_second) == (pytest.approx(200), pytest.approx(5000))
    assert verdict.skipped_steps == 2
    assert judge("r", {0: rows[:1]}, {}).ms_per_step == 9000
    assert judge("r", {}, {}).ms_per_step is None


def test_judging_metric_overrides_the_loss():
    """Higher is better: a recipe with a lower metric degrades, whatever its loss."""
    metric = Metric("mAP", higher_is_better=True, best=1.0, judges=True)

    def rows(loss, value):
        return [
            {"kind": "validation", "step": 9, "loss": loss, "metric": value},
            {"kind": "end", "step": 9, "status": "finished"},
        ]

    baselines = {seed: rows(0.1, value) for seed, value in enumerate((0.50, 0.51, 0.49))}
    for lost, status in ((0.003, MATCHES), (-0.4, MATCHES), (0.03, DEGRADES), (0.01, UNDECIDED)):
        values = [value - lost + noise for value, noise in ((0.50, 0.0), (0.51, 1e-4), (0.49, -1e-4))]
        verdict = judge("a", {seed: rows(0.1, value) for seed, value in enumerate(values)}, baselines, metric, 0.02)
        assert (verdict.status, verdict.final_loss) == (status, pytest.approx(0.1))
        assert verdict.final_metric == pytest.approx(0.5 - lost)
        assert verdict.paired_gap == pytest.approx(lost / 0.5, rel=1e-2)
    assert final_values({0: rows(0.1, 0.4)}, metric) == {0: 0.4}
    assert final_values({0: rows(0.1, 0.4)}, Metric("accuracy", True, 1.0)) == {0: 0.1}
    assert "differences of their final mAP" in rule(metric)
    assert "final validation loss" in rule()
    assert "below a loss of 2.5%" in rule(None, 0.025)


def test_verdict_converts_to_data():
    data = judge("r", worse_by(0.001, 0.002, 0.003), fp32()).to_dict()
    assert data["interval"].keys() == {"low", "high"}
    assert set(data["finals"]) == {"0", "1", "2"}
    assert data.keys() == {field.name for field in dataclasses.fields(judge("r", {}, {}))}
