"""Properties of every scale rule, over formats and tiles; a new rule is tested by being in its folder."""

import contextlib
import itertools
import json
import math

import pytest
import torch

from families import for_each, in_turn
from halfstep import formats, ops
from halfstep.errors import HalfstepError, QuantizationError, RecipeError
from halfstep.quant import Quantizer, Scales
from halfstep.quant.description import describe, restore
from halfstep.quant.quantizer import layout
from halfstep.quant.scaling import StatefulScaling, _by_name, get_scaling
from halfstep.quant.tile import ROW, TENSOR, Tile
from halfstep.recipe import linear_spec
from oracles.numbers import same_bits


RULES = sorted(name for name, rule in _by_name().items() if not isinstance(rule, StatefulScaling))
FORMATS = ("e4m3fn", "e5m2", "e2m1fn", "int8")
TILES = (TENSOR, ROW, Tile(1, 16), Tile(32, 1), Tile(8, 8))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_rule = pytest.mark.parametrize("rule", RULES)


def quantizers(rule, pairs=None):
    """(name, quantizer) of the rule for `pairs` of format and tile, or all, as far as the rule supports them."""
    found = []
    for format, tile in pairs or itertools.product(FORMATS, TILES):
        quantizer = Quantizer(formats.get(format), scales=Scales(tile, get_scaling(rule)))
        with contextlib.suppress(HalfstepError):  # rules may support some formats or tiles only
            quantizer(torch.ones(2, 2))
            found.append((f"{format}, {tile}", quantizer))
    assert found, f"{rule} takes none of {FORMATS} in {[str(tile) for tile in TILES]}"
    return found


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.quick(
    "in turn-absmax", "in turn-below", "in turn-double_absmax", "in turn-fixed", "in turn-rceil", "in turn-two_level_up"
)
@every_rule
@pytest.mark.parametrize(
    ("dtype", "pairs"),  # each pair compiles kernels
    [(torch.float32, in_turn(FORMATS, TILES)), *(pytest.param(d, None, marks=pytest.mark.slow) for d in DTYPES)],
    ids=["in turn", *map(str, DTYPES)],
)
def test_kernels_and_codes_equal_the_reference(rule, dtype, pairs):
    @for_each("name, quantizer", quantizers(rule, pairs), ids=lambda member: member[0])
    def check(name, quantizer):
        for shape in ((24, 40), (5, 7), (1, 1), (3,), (0, 4), (2, 8, 16)):
            x = draw(*shape).to(dtype)
            expected = quantizer(x)
            same_bits(ops.quantize(x, quantizer).dequantize(), expected)
            same_bits(ops.round_to(x, quantizer), expected)

    check()


@pytest.mark.quick("absmax", "below", "double_absmax", "fixed", "rceil", "two_level_up")
@every_rule
def test_zeros_stay_zero_and_nonfinite_values_spread_over_their_tile(rule):
    """Or over the whole tensor if the scales share a second-level one."""

    @for_each("name, quantizer", quantizers(rule), ids=lambda member: member[0])
    def check(name, quantizer):
        assert not quantizer(torch.zeros(16, 32)).any()
        if not quantizer.scales.rule.reads:  # a fixed scale
            return
        for bad in (math.inf, math.nan):
            x = draw(64, 64)
            x[0, 0] = bad
            found = quantizer(x)
            kept = quantizer.scales.rule.layout((4, 4)).values()
            whole = quantizer.scales.tile == TENSOR or any(math.prod(shape) != 16 for _, shape in kept)
            assert found[0, 0].isnan()
            assert whole or not found[32:, 32:].isnan().any()

    check()


@every_rule
def test_values_equal_elements_times_the_stored_scale(rule):
    @for_each("name, quantizer", quantizers(rule), ids=lambda member: member[0])
    def check(name, quantizer):
        x = draw(24, 40)
        made = quantizer.quantize(x)
        expected = layout(quantizer, (24, 40), torch.float32)
        assert {part: (t.dtype, tuple(t.shape)) for part, t in made.tensors.items()} == expected
        tile, rule = quantizer.scales.tile, quantizer.scales.rule
        if not rule.linear:  # code that takes values for multiples of the scale must fail, not compute wrong results
            with pytest.raises(QuantizationError, match=r"not its elements times a scale: .* dequantize\(\)"):
                rule.multiplier(made.tensors, quantizer.format)
            with pytest.raises(RecipeError, match=f"an operand of a matmul in .* {rule.name} is for stored tensors"):
                linear_spec(weight=quantizer)
            return
        multiplier = tile.spread(rule.multiplier(made.tensors, quantizer.format), 24, 40)
        assert (multiplier >= 0).all()
        if "zero_point" not in made.tensors:
            elements = torch.where(multiplier == 0, 0.0, made.dequantize() / multiplier)
            limit = max(abs(quantizer.format.max), abs(quantizer.format.min))
            assert (elements.abs() <= limit * (1 + 2.0**-20)).all()

    check()


@every_rule
def test_description_restores_the_quantizer(rule):
    @for_each("name, quantizer", quantizers(rule), ids=lambda member: member[0])
    def check(name, quantizer):
        data = json.loads(json.dumps(describe(quantizer, (24, 40), torch.float32)))
        assert restore(data) == (quantizer, (24, 40), torch.float32)

    check()
