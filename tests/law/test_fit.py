"""Fits recover the constants that generated the data, as precisely as the noise allows."""

import itertools
import statistics
from dataclasses import replace

import numpy as np
import pytest

from halfstep.errors import LawError
from halfstep.law import KUMAR, Cell, Damage, fit_damage, fit_loss, least_squares


SIZES, TOKENS, BITS = (30e6, 60e6, 110e6, 220e6), (1.5e9, 3e9, 6e9, 13e9, 26e9), (3, 4, 5, 6, 8, 12, None)
GRID = list(itertools.product(SIZES, TOKENS, BITS))


def cells(noise=0.0, seed=0, grid=GRID):
    generator = np.random.default_rng(seed)
    return [
        Cell(n, d, p, KUMAR.loss(n, d, {"weights": p} if p else {}) * (1 + noise * generator.normal()))
        for n, d, p in grid
    ]


def test_constants_are_recovered():
    found = fit_loss(cells(), resamples=0)
    assert found.constants["gamma"] == pytest.approx(2.6745, rel=1e-3)
    assert found.constants["offset"] == pytest.approx(0.3037, abs=1e-3)
    assert found.constants["a"] == pytest.approx(0.4965, rel=1e-3)
    assert found.constants["floor"] == pytest.approx(2.7648, rel=1e-3)
    assert found.r2 > 0.999999
    law = found.law()
    assert law.loss(1e9, 1e11, {"weights": 4}) == pytest.approx(KUMAR.loss(1e9, 1e11, {"weights": 4}), rel=1e-3)
    assert law.share({"weights": 6}) == pytest.approx(KUMAR.share({"weights": 6}), abs=1e-3)


@pytest.mark.slow
def test_intervals_equal_the_spread_over_noisy_runs():
    found = [fit_loss(cells(0.002, seed), resamples=0).constants["gamma"] for seed in range(12)]
    spread = statistics.stdev(found)
    low, high = fit_loss(cells(0.002), resamples=60).intervals["gamma"]
    assert low < 2.6745 < high
    assert 0.5 < (high - low) / (4 * spread) < 2


def test_bits_without_effect_raise():
    same = [Cell(n, d, p, KUMAR.loss(n, d)) for n, d, p in GRID]
    with pytest.raises(
        LawError, match=r"the bits make no difference that these 140 runs show: between 3 and 12 of them"
    ):
        fit_loss(same, resamples=0)
    assert fit_loss([cell for cell in same if cell.bits is None], resamples=0).r2 > 0.999999


def damages(noise=0.0):
    generator = np.random.default_rng(0)
    grid = itertools.product(SIZES, TOKENS, (3, 4, 5))
    return [Damage(n, d, p, KUMAR.damage(n, d, p) * np.exp(noise * generator.normal())) for n, d, p in grid]


def test_damage_constants_are_recovered():
    found = fit_damage(damages(), resamples=0)
    post = found.constants
    assert (post["tokens"], post["parameters"], post["gamma"]) == pytest.approx((0.5068, 0.3439, 0.5907), rel=1e-4)
    law = fit_loss(cells(), resamples=0).law(found)
    assert law.damage(1e9, 1e11, 4) == pytest.approx(KUMAR.damage(1e9, 1e11, 4), rel=1e-3)
    noisy = fit_damage(damages(0.1), resamples=100)
    assert all(noisy.intervals[name][0] < post[name] < noisy.intervals[name][1] for name in ("tokens", "gamma"))


def test_too_few_runs_raise_and_name_the_missing_ones():
    few = [cell for cell in cells() if cell.parameters in SIZES[:2] and cell.tokens < 3e9]
    with pytest.raises(LawError) as said:
        fit_loss(few)
    assert "parameters: 3e+07, 6e+07; tokens: 1.5e+09" in str(said.value)
    assert "Missing: 1 more of parameters, 2 more of tokens. Train them: halfstep sweep --resume" in str(said.value)
    whole = [cell for cell in cells() if cell.bits in (None, 3)]
    with pytest.raises(LawError, match=r"bits: 3; .*Missing: 2 more of bits"):
        fit_loss(whole)
    assert "gamma" not in fit_loss([cell for cell in cells() if cell.bits is None], resamples=0).constants
    with pytest.raises(LawError, match=r"0 runs found, with parameters: none; tokens: none"):
        fit_loss([])


def test_nonpositive_damage_raises():
    wrong = [*damages()[:-1], replace(damages()[-1], damage=-1e-4)]
    with pytest.raises(LawError, match=r"1 of 60 damages are not positive, the first Damage\(.*fewer bits"):
        fit_damage(wrong)


def test_least_squares_recovers_an_exponential():
    x = np.linspace(0, 3, 40)
    data = 2.5 * np.exp(-1.3 * x) + 0.7
    found = least_squares(lambda p: p[0] * np.exp(-p[1] * x) + p[2] - data, np.array([1.0, 0.5, 0.0]))
    assert found == pytest.approx([2.5, 1.3, 0.7], rel=1e-6)
