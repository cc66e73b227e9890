"""The rule's edges: what matches, degrades, diverges, or cannot be told."""

import math
import statistics

import pytest

from halfstep.lab.facts import Metric
from halfstep.lab.verdict import (
    DEGRADES,
    DIVERGED,
    MATCHES,
    MIN_BASELINES,
    TOLERANCE,
    UNMEASURED,
    band,
    final_loss,
    final_value,
    judge,
    rule,
)


NARROW = {0: 2.0, 1: 2.0, 2: 2.0}
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


def test_band_is_two_sigma_where_that_is_more_than_the_tolerance():
    found = band(list(WIDE.values()))
    assert found.half_width == 2 * statistics.stdev(WIDE.values())
    assert (found.mean, found.seeds) == (pytest.approx(2.0), 3)
    assert (found.lower, found.upper) == (found.mean - found.half_width, found.mean + found.half_width)


@pytest.mark.parametrize("finals", [[2.0, 2.0, 2.0], [1.9999, 2.0, 2.0001]])
def test_band_is_never_narrower_than_the_tolerance(finals):
    assert band(finals).half_width == pytest.approx(TOLERANCE * 2.0, rel=1e-12)


@pytest.mark.parametrize("count", range(MIN_BASELINES))
def test_fewer_seeds_make_no_band(count):
    assert band([2.0] * count) is None


@pytest.mark.parametrize("baselines", [NARROW, WIDE], ids=["tolerance", "sigma"])
def test_exactly_at_the_band_matches_and_above_it_degrades(baselines):
    upper = band(list(baselines.values())).upper
    assert judge("r", {0: finished(upper)}, baselines).status == MATCHES
    assert judge("r", {0: finished(math.nextafter(upper, 9))}, baselines).status == DEGRADES
    assert judge("r", {0: finished(0.1)}, baselines).status == MATCHES  # better than fp32 is no degradation


@pytest.mark.parametrize("baselines", [{}, {0: 2.0}, {0: 2.0, 1: 2.0}])
def test_without_a_band_nothing_matches_or_degrades(baselines):
    verdict = judge("r", {0: finished(9.0)}, baselines)
    assert (verdict.status, verdict.gap) == (UNMEASURED, None)
    assert verdict.paired_gap == (3.5 if baselines else None)


def test_the_gap_is_to_the_mean_and_the_paired_gap_to_the_same_seed():
    verdict = judge("r", {2: finished(2.2), 7: finished(2.0)}, WIDE)
    assert verdict.final_loss == pytest.approx(2.1)
    assert verdict.gap == pytest.approx(0.05)
    assert verdict.paired_gap == pytest.approx((2.2 - 2.1) / 2.1)  # seed 7 has no counterpart
    assert verdict.seeds == 2


def test_one_diverged_seed_is_a_diverged_recipe():
    verdict = judge("r", {0: finished(2.0), 1: diverged(at=2)}, NARROW)
    assert (verdict.status, verdict.diverged_at, verdict.first_nonfinite) == (DIVERGED, 2, "head.weight (gradient)")
    assert verdict.reason == "the loss is NaN"
    assert (verdict.final_loss, verdict.gap, verdict.paired_gap) == (None, None, None)


def test_diverged_outranks_an_unmeasured_band():
    assert judge("r", {0: diverged(at=1, tensor=None)}, {}).status == DIVERGED


def test_the_last_update_can_diverge_too():
    """No step looks at what the last update wrote; the validation after it does, and writes null."""
    verdict = judge("r", {0: finished(None)}, NARROW)
    assert (verdict.status, verdict.diverged_at, verdict.first_nonfinite) == (DIVERGED, 3, None)
    assert "validation" in verdict.reason


@pytest.mark.parametrize("rows", [[], finished(2.0)[:1], finished(2.0)[:-1]], ids=["empty", "begun", "no end"])
def test_a_killed_run_is_not_finished(rows):
    assert final_loss(rows) is None
    assert judge("r", {0: rows}, NARROW).status == "not finished"


def test_a_recipe_is_judged_on_the_seeds_that_finished():
    verdict = judge("r", {0: finished(2.0), 1: finished(9.0)[:-1]}, NARROW)
    assert (verdict.status, verdict.final_loss) == (MATCHES, 2.0)


def test_times_are_medians_without_the_first_step():
    rows = [step(1, 9.0), step(2, 0.1), step(3, 0.2, skipped=True), step(4, 0.3, skipped=True)]
    verdict = judge("r", {0: rows}, {})
    assert (verdict.ms_per_step, verdict.tokens_per_second) == (pytest.approx(200), pytest.approx(5000))
    assert verdict.skipped_steps == 2
    assert judge("r", {0: rows[:1]}, {}).ms_per_step == 9000
    assert judge("r", {}, {}).ms_per_step is None


def test_where_the_metric_judges_the_loss_does_not():
    """Higher is better here: a recipe below fp32's band degrades, whatever its loss."""
    metric = Metric("mAP", higher_is_better=True, best=1.0, judges=True)

    def rows(loss, value):
        return [
            {"kind": "validation", "step": 9, "loss": loss, "metric": value},
            {"kind": "end", "step": 9, "status": "finished"},
        ]

    baselines = {0: 0.50, 1: 0.51, 2: 0.49}  # the band is 0.5 plus or minus 0.02
    for value, status in ((0.485, MATCHES), (0.9, MATCHES), (0.47, DEGRADES)):
        verdict = judge("a", {0: rows(0.1, value)}, baselines, metric)
        assert (verdict.status, verdict.final_loss, verdict.final_metric) == (status, 0.1, value)
        assert verdict.gap == pytest.approx((0.5 - value) / 0.5)
        assert verdict.paired_gap == pytest.approx((0.5 - value) / 0.5)
    assert final_value(rows(0.1, 0.4), metric) == 0.4
    assert final_value(rows(0.1, 0.4), Metric("accuracy", True, 1.0)) == 0.1
    assert "final mAP is inside it or above matches; below it, it degrades" in rule(metric)
    assert "final loss is inside it or below matches; above it, it degrades" in rule()
