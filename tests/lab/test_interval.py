"""Confidence intervals of paired differences: against scipy and printed tables, with error rates on simulated seeds."""

import math
import random
import statistics

import pytest
from scipy import stats

from families import slow_unless
from halfstep.lab.interval import LEVEL, Interval, borrowed, paired, paired_power, pairs_to_decide, t_quantile
from halfstep.lab.verdict import DEGRADES, MATCHES, UNDECIDED, difference


MARGIN = 0.01
TRIALS = 2000
every_count = pytest.mark.parametrize("seeds", slow_unless((2, 8).__contains__, [2, 3, 5, 8]))


@pytest.mark.parametrize(("degrees", "printed"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (30, 2.042)])
def test_quantiles_equal_printed_tables(degrees, printed):
    assert round(t_quantile(0.975, degrees), 3) == printed


@pytest.mark.slow
def test_quantiles_equal_scipy():
    for degrees in [*range(1, 41), 99, 100, 999, 1000, 9999]:
        for probability in (0.5, 0.6, 0.9, 0.975, 0.9999):
            wanted = stats.t.ppf(probability, degrees)
            assert t_quantile(probability, degrees) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("differences", [[0.1, 0.3], [1.0, 2.0, 4.0], [-0.2, 0.1, 0.05, 0.3, -0.01]])
def test_paired_interval_equals_scipy(differences):
    wanted = stats.ttest_1samp(differences, 0.0).confidence_interval(LEVEL)
    found = paired(differences)
    assert (found.low, found.high) == (pytest.approx(wanted.low), pytest.approx(wanted.high))


def test_single_difference_raises():
    with pytest.raises(statistics.StatisticsError):
        paired([0.1])


def test_borrowed_interval_uses_sqrt_2_times_the_others_spread():
    found, half = borrowed([0.5], [0.9, 1.0, 1.1]), stats.t.ppf(0.975, 2) * math.sqrt(2) * 0.1
    assert (found.low, found.high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert borrowed([0.5] * 4, [0.9, 1.0, 1.1]) == Interval(
        pytest.approx(0.5 - half / 2), pytest.approx(0.5 + half / 2)
    )


def test_pairs_to_decide_is_the_smallest_that_decides():
    for mean, spread in [(0.0, 0.02), (0.002, 0.01), (0.03, 0.05), (0.009, 0.001)]:
        count = pairs_to_decide(mean, spread, MARGIN)
        halves = {n: stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) for n in (count - 1, count) if n > 1}
        assert halves[count] < abs(mean - MARGIN)
        assert count == 2 or halves[count - 1] >= abs(mean - MARGIN)
    assert pairs_to_decide(MARGIN, 0.01, MARGIN) is None
    assert pairs_to_decide(0.0, 0.0, MARGIN) == 2


def test_paired_power_equals_noncentral_t():
    for spread, pairs, effect in ((1.0, 34, 0.5), (0.14, 9, 0.088), (0.14, 20, 0.088), (0.05, 40, 0.02)):
        shift, least = effect * math.sqrt(pairs) / spread, stats.t.ppf((1 + LEVEL) / 2, pairs - 1)
        exact = stats.nct.sf(least, pairs - 1, shift)
        assert paired_power(spread, pairs, effect) == pytest.approx(exact, abs=0.06 if pairs < 10 else 0.02)
    assert paired_power(0.0, 3, 0.1) == 1.0


def simulated(true_gap, seeds, between, within, generator, pairs=None):
    """A simulated verdict: fp32's losses spread by `between` over seeds, and the recipe's gaps to it by `within`."""
    baselines = {seed: 2.0 * (1 + generator.gauss(0, between)) for seed in range(seeds)}
    finals = {seed: baselines[seed] * (1 + generator.gauss(true_gap, within)) for seed in range(pairs or seeds)}
    return difference(finals, baselines, margin=MARGIN)


def rates(true_gap, seeds, between=0.05, within=0.004, pairs=None):
    generator = random.Random(f"{true_gap} {seeds} {pairs}")
    found = [simulated(true_gap, seeds, between, within, generator, pairs) for _ in range(TRIALS)]
    held = sum(one.interval.low <= true_gap <= one.interval.high for one in found) / TRIALS
    return held, {s: sum(one.status == s for one in found) / TRIALS for s in (MATCHES, DEGRADES, UNDECIDED)}


@pytest.mark.quick("2")
@every_count
def test_interval_has_the_stated_coverage(seeds):
    held, _ = rates(0.003, seeds)
    assert held == pytest.approx(LEVEL, abs=4 * math.sqrt(LEVEL * (1 - LEVEL) / TRIALS))


@pytest.mark.quick("2")
@every_count
def test_error_rates_at_the_margin_are_as_stated(seeds):
    """Worst case: a recipe worse by exactly the margin. Simulation error: four standard errors."""
    each = (1 - LEVEL) / 2
    _, found = rates(MARGIN, seeds)
    allowed = each + 4 * math.sqrt(each * (1 - each) / TRIALS)
    assert 0 < found[MATCHES] <= allowed
    assert 0 < found[DEGRADES] <= allowed


def test_error_rates_of_single_independent_seeds_are_as_stated():
    """The bound's own worst case: differences spread by sqrt(2) times fp32's spread."""
    spread = 0.002
    _, found = rates(MARGIN, 3, between=spread, within=math.sqrt(2) * spread, pairs=1)
    each = (1 - LEVEL) / 2
    allowed = each + 4 * math.sqrt(each * (1 - each) / TRIALS)
    assert 0 < found[MATCHES] <= allowed
    assert 0 < found[DEGRADES] <= allowed


@pytest.mark.slow
def test_ten_seeds_decide_clear_cases():
    """A spread of 0.4% and a gap of 0.2%: ten seeds show that it is below 1%."""
    assert rates(0.002, 10)[1][MATCHES] > 0.97
    assert rates(0.02, 10)[1][DEGRADES] > 0.97


def test_pairs_to_decide_above_1000_is_none():
    """About 900 and 1,500 pairs: (1.96 spread / distance)^2."""
    assert 890 < pairs_to_decide(1.96 / 30, 1.0, 0.0) < 910
    assert pairs_to_decide(1.96 / 1500**0.5, 1.0, 0.0) is None
