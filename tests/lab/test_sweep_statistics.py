"""Spikes, divergence, shares and best learning rates, each against an independent computation."""

import math
import random
import statistics

import numpy as np
import pytest
from scipy import stats

from halfstep.lab.interval import compared, fisher, power, runs_to_tell, wilson
from halfstep.lab.spikes import Spike, spikes
from halfstep.lab.sweep.folder import CellState
from halfstep.lab.sweep.report import best_rates, outcome


def curve(steps=400, noise=0.02, seed=0):
    random_ = random.Random(seed)
    return [2 + 3.5 * math.exp(-step / 40) + noise * random_.gauss(0, 1) for step in range(steps)]


def test_planted_spikes_are_found():
    losses = curve()
    planted = {180: 1, 220: 3, 225: 1, 300: 12}
    for start, length in planted.items():
        for place in range(start, start + length):
            losses[place] += 0.5
    found = spikes(losses)
    assert {spike.start: spike.length for spike in found} == planted


def test_height_is_in_standard_deviations_of_the_trailing_window():
    losses = curve(noise=0.05)
    losses[250] += 1.0
    window = losses[200:250]
    median = statistics.median(window)
    spread = stats.median_abs_deviation(window, scale="normal")
    (spike,) = spikes(losses)
    assert spike == Spike(250, 1, pytest.approx((losses[250] - median) / spread, rel=1e-3))


def test_noise_has_almost_no_spikes():
    """Negative control: thirty fp32-like curves. A threshold of 3 would find many."""
    curves = [curve(noise=0.05, seed=seed) for seed in range(30)]
    assert sum(len(spikes(losses)) for losses in curves) <= 1
    assert sum(len(spikes(losses, threshold=3.0)) for losses in curves) > 10


def test_lasting_rise_is_one_spike_and_nonfinite_losses_are_spikes():
    level = [1.0, 1.01, 0.99] * 10
    assert [(s.start, s.length) for s in spikes([*level, *[5.0] * 60])] == [(30, 60)]
    assert spikes([*level, None, *level]) == [Spike(30, 1, math.inf)]
    assert spikes([9.0, None, *level]) == []


@pytest.mark.parametrize(("hits", "runs"), [(18, 188), (0, 70), (5, 5), (1, 2)])
def test_wilson_equals_scipy(hits, runs):
    expected = stats.binomtest(hits, runs).proportion_ci(method="wilson")
    found = wilson(hits, runs)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_fisher_equals_scipy():
    for a, of_a, b, of_b in [(18, 188, 0, 70), (3, 30, 9, 30), (0, 5, 5, 5), (1, 7, 0, 3), (4, 4, 4, 4)]:
        expected = stats.fisher_exact([[a, of_a - a], [b, of_b - b]]).pvalue
        assert fisher(a, of_a, b, of_b) == pytest.approx(expected, rel=1e-9)


def test_power_equals_simulation():
    generator = np.random.default_rng(0)
    a, b = generator.binomial(40, 0.4, 4000), generator.binomial(40, 0.1, 4000)
    hits = statistics.fmean(fisher(int(x), 40, int(y), 40) < 0.05 for x, y in zip(a, b, strict=True))
    assert power(0.4, 40, 0.1, 40) == pytest.approx(hits, abs=0.03)


def test_runs_to_tell_reach_the_power():
    runs = runs_to_tell(0.3, 0.1)
    assert 0.77 < power(0.3, runs, 0.1, runs) < 0.86
    assert runs_to_tell(0.1, 0.1) is None
    assert runs_to_tell(0.1, 0.1001) is None


def test_verdicts_on_shares():
    assert compared(18, 188, 0, 70)["verdict"] == "more"
    assert compared(0, 70, 18, 188)["verdict"] == "fewer"
    assert compared(1, 30, 0, 30)["verdict"] == "cannot tell"
    assert compared(2, 400, 1, 400)["verdict"] == "no difference"


def test_best_rates_and_their_confidence():
    generator = np.random.default_rng(1)
    shared = generator.normal(0, 0.1, 8)  # the seeds' common effect on all recipes
    rates = (1e-3, 1e-2, 1e-1)

    def table(*levels):
        return [list(level + shared + generator.normal(0, 0.005, 8)) for level in levels]

    losses = {"fp32": table(2.2, 2.0, 2.5), "near": table(2.2, 2.02, 2.5), "moved": table(1.9, 2.1, 2.6)}
    losses["lost"] = [[math.inf] * 8] * 3
    found = best_rates(losses, rates, "fp32")
    assert "lost" not in found
    assert (found["fp32"]["lr"], found["near"]["lr"], found["moved"]["lr"]) == (1e-2, 1e-2, 1e-3)
    assert found["near"]["other_rate"] == 0.0
    assert found["moved"]["other_rate"] == 1.0
    # Seeds spread by 5%, which pairing removes.
    near = found["near"]["gap_interval"]
    assert near["low"] > 0.005
    assert near["high"] < 0.015
    assert found["near"]["interval"]["high"] - found["near"]["interval"]["low"] > 0.05


def cell(losses, validations, status="finished"):
    rows = [{"kind": "validation", "step": 0, "loss": validations[0]}]
    rows += [
        {"kind": "step", "step": step, "loss": loss, "tokens": 4, "seconds": 0.5} for step, loss in enumerate(losses, 1)
    ]
    rows += [{"kind": "validation", "step": len(losses), "loss": loss} for loss in validations[1:]]
    rows.append({"kind": "end", "step": len(losses), "status": status})
    return outcome(("lr-1", "fp32", 0), CellState(status, len(losses)), rows)


def test_run_that_recovers_after_losing_its_progress_is_diverged():
    learning = [5.5, 5.6, 5.5, 5.4, 4.0, *[3.0] * 30]
    assert cell(learning, [5.55, 2.9]).status == "finished"
    back = cell([*learning, *[7.0] * 8, *[3.0] * 30], [5.55, 2.9])
    assert back.status == "diverged"
    assert back.spikes == (36,)
    assert back.onset == 36
    assert cell([*learning, *[7.0] * 3, *[3.0] * 30], [5.55, 2.9]).status == "finished"
    assert cell([5.6] * 40, [5.55, 5.4]).status == "finished"  # it never learned, so it lost nothing
    ended = cell([5.6] * 40, [5.55, 5.7])
    assert (ended.status, ended.onset) == ("diverged", 40)
    assert cell(learning, [5.55, 2.9]).onset is None
    assert cell(learning, [5.55, None], "diverged").status == "diverged"
    assert cell(learning, [5.55, 2.9]).tokens == 4 * 35
