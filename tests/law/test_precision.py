"""The published law against the paper's figures, and against numerical searches instead of its closed forms."""

import itertools
import math
from dataclasses import replace

import pytest

from halfstep.errors import LawError
from halfstep.law import KUMAR, Width


ALL = ("weights", "activations", "kv")


def alike(bits):
    return dict.fromkeys(ALL, bits)


def test_best_bits_need_the_offsets():
    """The paper's 7 to 8 bits; its equation 4 as printed gives less than 4."""
    assert KUMAR.best_bits() == pytest.approx(7.00, abs=0.01)
    assert KUMAR.without_offsets().best_bits() == pytest.approx(3.47, abs=0.01)
    gamma = sum(width.gamma for width in KUMAR.widths.values()) / 3
    assert gamma == pytest.approx(1.9475, abs=1e-4)
    averaged = replace(KUMAR, widths=dict.fromkeys(ALL, Width(gamma)))
    assert averaged.best_bits() == pytest.approx(3.71, abs=0.01)
    assert averaged.best_bits() / gamma == pytest.approx(1.9038, abs=1e-3)  # 3x = e^x - 1


def test_effective_parameter_shares_equal_published():
    assert [round(KUMAR.share(alike(bits)), 2) for bits in (4, 8)] == [0.19, 0.83]
    assert KUMAR.share(alike(16)) == pytest.approx(0.994, abs=5e-4)
    plain = KUMAR.without_offsets()
    assert [round(plain.share(alike(bits)), 2) for bits in (4, 8)] == [0.64, 0.92]
    assert KUMAR.share({}) == 1


@pytest.mark.parametrize(
    ("parameters", "expected"), [(30e6, (0.586, 0.108, 0.0198, 0.0036)), (220e6, (0.295, 0.054, 0.0100, 0.0018))]
)
def test_damage_after_training_equals_published(parameters, expected):
    found = [KUMAR.damage(parameters, 26e9, bits) for bits in (3, 4, 5, 6)]
    assert found == pytest.approx(expected, rel=0.03)


def test_damage_rises_with_data_and_falls_with_size_and_bits():
    base = KUMAR.damage(1e8, 1e10, 4)
    assert KUMAR.damage(1e8, 2e10, 4) > base > KUMAR.damage(2e8, 1e10, 4)
    assert base > KUMAR.damage(1e8, 1e10, 5)
    assert KUMAR.loss(1e8, 1e10, post=4) == pytest.approx(KUMAR.loss(1e8, 1e10) + base)


@pytest.mark.parametrize(("bits", "ratio"), [(3, 177), (4, 959), (5, 5.2e3), (6, 2.8e4), (8, 8.2e5)])
def test_harmful_tokens_equal_published_and_minimize_the_loss(bits, ratio):
    """The paper's tokens per parameter; by a search, the loss after rounding is lowest there."""
    tokens = KUMAR.harmful_tokens(30e6, bits)
    assert tokens / 30e6 == pytest.approx(ratio, rel=0.02)
    around = [KUMAR.loss(30e6, tokens * factor, post=bits) for factor in (0.8, 1.0, 1.25)]
    assert around[1] < min(around[0], around[2])


def test_best_for_a_budget_equals_a_search():
    for compute in (1e19, 1e22):
        bits, parameters, tokens = KUMAR.best_for(compute)
        assert bits == pytest.approx(KUMAR.best_bits(), abs=1e-3)  # for any compute
        assert 6 / 16 * parameters * tokens * bits == pytest.approx(compute)
        best = KUMAR.loss(parameters, tokens, alike(bits))
        for more, other in itertools.product((0.9, 1.0, 1.1), (6.5, bits, 7.5)):
            if (more, other) != (1.0, bits):
                size = parameters * more
                assert KUMAR.loss(size, compute * 16 / 6 / other / size, alike(other)) > best


def test_loss_without_effective_parameters_is_infinite():
    assert KUMAR.loss(1e8, 1e10, {"activations": 3}) == math.inf  # 3 bits: unstable, and excluded from the paper's fits


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: KUMAR.loss(0, 1e9), "parameters = 0; expected a positive number"),
        (lambda: KUMAR.loss(1e9, math.inf), "tokens = inf; expected a positive number"),
        (lambda: KUMAR.share({"weights": -1}), "bits of weights = -1"),
        (lambda: KUMAR.share({"gradients": 8}), "unknown part 'gradients'"),
        (lambda: KUMAR.damage(1e8, 1e10, 0), "bits after training = 0"),
        (lambda: replace(KUMAR, post=None).damage(1, 1, 4), "no term for rounding after training; fit one"),
        (lambda: replace(KUMAR, a=0.4).best_bits(), "a = 0.4 and b = 0.4965 differ: the best bits depend on the comp"),
    ],
)
def test_invalid_arguments_raise(call, said):
    with pytest.raises(LawError, match=said):
        call()
