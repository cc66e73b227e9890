"""Recipes `bits-eXmY`: masked bits and the nearest value, bit by bit, and models under them."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import RecipeError


def operand(name):
    return halfstep.get_recipe(name).rules[0].linear.output.lhs


def every_bfloat16():
    codes = torch.arange(2**16, dtype=torch.int64, device="cpu").to(torch.uint16)
    values = codes.view(torch.bfloat16)
    finite = values.isfinite()
    return codes[finite], values[finite]


@pytest.mark.parametrize("mantissa", range(1, 8))
def test_masking_recipes_clear_the_low_mantissa_bits(mantissa):
    codes, values = every_bfloat16()
    mask = 0xFFFF << (7 - mantissa) & 0xFFFF
    expected = (codes.to(torch.int32) & mask).to(torch.uint16).view(torch.bfloat16)
    assert torch.equal(operand(f"bits-e8m{mantissa}")(values).view(torch.int16), expected.view(torch.int16))


def test_seven_mantissa_bits_leave_bfloat16_unchanged():
    _, values = every_bfloat16()
    for name in ("bits-e8m7", "bits-e8m7-nearest"):
        assert torch.equal(operand(name)(values), values)


def nearest(x: Fraction, exponent: int, mantissa: int) -> Fraction:
    """The nearest value of a float with subnormals and saturation, ties to even, in exact arithmetic."""
    bias = 2 ** (exponent - 1) - 1
    size = abs(x)
    power = max(1 - bias, math.frexp(size)[1] - 1)
    step = Fraction(2) ** (power - mantissa)
    rounded = round(size / step) * step  # Python rounds a Fraction's half to even
    largest = (2 - Fraction(1, 2**mantissa)) * Fraction(2) ** bias
    return min(rounded, largest) * (1 if x >= 0 else -1)


@pytest.mark.parametrize(("exponent", "mantissa"), [(8, 3), (8, 1), (5, 2), (4, 3), (7, 7)])
def test_nearest_recipes_round_to_the_nearest_fraction(exponent, mantissa):
    _, values = every_bfloat16()
    values = values[::29]
    found = operand(f"bits-e{exponent}m{mantissa}-nearest")(values)
    for x, y in zip(values.tolist(), found.tolist(), strict=True):
        assert Fraction(y) == nearest(Fraction(x), exponent, mantissa)


@pytest.mark.parametrize(("mantissa", "largest", "mean"), [(6, 0.0078, -0.0028), (3, 0.1049, -0.0411)])
def test_masking_is_biased_and_rounding_to_nearest_is_not(mantissa, largest, mean):
    """On normal values, whose figures were computed once with integers; rounding to nearest has next to no bias."""
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").bfloat16()
    x = x[x != 0]
    for name, bias in ((f"bits-e8m{mantissa}", mean), (f"bits-e8m{mantissa}-nearest", 0.0)):
        shrunk = (operand(name)(x).double() / x.double()).mean() - 1
        assert abs(float(shrunk) - bias) < 1e-3
    error = ((operand(f"bits-e8m{mantissa}")(x).double() - x.double()) / x.double()).abs().max()
    bound = 2**-mantissa - 2**-7
    assert largest * 0.98 < float(error) <= bound


def outputs(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    model, _, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    out = model(torch.arange(8, dtype=torch.int64, device="cpu"))
    out.square().mean().backward()
    return out, model[1].weight.grad


def test_bits_e8m7_trains_as_bf16_master_and_fewer_bits_do_not():
    plain, whole, masked = outputs("bf16-master"), outputs("bits-e8m7"), outputs("bits-e8m3")
    assert all(torch.equal(a, b) for a, b in zip(plain, whole, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(plain, masked, strict=True))


@pytest.mark.parametrize("name", ["bits-e9m3", "bits-e1m3", "bits-e8m8"])
def test_more_bits_than_bf16_has_raise(name):
    with pytest.raises(RecipeError, match="expected e2 to e8 and m0 to m7, such as bits-e8m3"):
        halfstep.get_recipe(name)


def test_partial_precision_recipes_round_trip_as_data():
    for name in ("bits-e8m2", "bits-e5m2-nearest", "bits-e8m0"):
        recipe = halfstep.get_recipe(name)
        assert halfstep.recipe.from_data(halfstep.recipe.to_data(recipe), halfstep.get_recipe) == recipe
