"""Which Hadamard transforms the Triton kernels support, alone and with rounding; and random ones in the interpreter."""

from dataclasses import replace

import pytest
import torch
from test_proofs import OLDEST, PINNED, assert_all_equal, json_lines

from families import for_each
from halfstep.kernels.gpu import rotated, turned
from halfstep.quant import Hadamard, Scales, Tile, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import get_recipe, list_recipes


META = torch.device("meta")
RECIPES = [name for name in list_recipes() if any(rule.linear.rotates for rule in get_recipe(name).rules)]


def signs(size):
    return torch.empty(size, device=META)


def test_the_recipes_with_rotations_are_found():
    assert {"nvfp4", "mxfp4-rht"} <= set(RECIPES)


@for_each("name", RECIPES)
def test_rotated_operands_of_recipes_are_rounded_in_the_same_pass(name):
    """Along either dimension, as values and as codes."""
    x = torch.empty(128, 256, device=META)
    specs = [rule.linear for rule in get_recipe(name).rules if rule.linear.rotates]
    products = [product for spec in specs for product in (spec.output, spec.grad_input, spec.grad_weight)]
    for product in products:
        if product.hadamard is None:
            continue
        for operand in (product.lhs, product.rhs):
            inner = operand.plain.inner or operand.plain
            assert rotated.constants(x, signs(product.hadamard.size), 1, inner) is not None
            assert rotated.constants(x, signs(product.hadamard.size), 0, inner.down) is not None
            for dim in (0, 1):
                assert rotated.constants(x, signs(product.hadamard.size), dim, operand.plain, turned=True) is not None


def test_tiles_across_or_longer_than_the_rotation_are_refused():
    x, quantizer = torch.empty(128, 256, device=META), get_quantizer("mxfp8")
    assert rotated.constants(x, signs(32), 1, quantizer) is not None
    assert rotated.constants(x, signs(16), 1, quantizer) is None
    assert rotated.constants(x, signs(32), 0, quantizer) is None
    assert rotated.constants(x, signs(32), 0, quantizer.down) is not None
    for tile in (Tile(16, 16), Tile(0, 0), Tile(1, 0), Tile(1, 24)):
        square = replace(quantizer, scales=Scales(tile, get_scaling("rceil")))
        assert rotated.constants(x, signs(32), 1, square) is None, tile
    assert rotated.constants(x, signs(32), 1, replace(quantizer, rounding="toward_zero")) is None


def test_unsupported_sizes_dtypes_and_layouts_are_refused():
    x = torch.empty(128, 256, device=META)
    sizes = [size for size in (2, 4, 8, 16, 32, 64, 128) if rotated.constants(x, signs(size), 0) is not None]
    assert sizes == [8, 16, 32, 64]
    assert rotated.constants(x.double(), signs(16), 0) is None
    assert rotated.constants(x.t(), signs(16), 0) is None
    assert rotated.constants(x[:0], signs(16), 0) is None
    stack = torch.empty(3, 4, 32, device=META)
    assert rotated.constants(stack, signs(16), -1) is not None
    assert rotated.constants(stack, signs(16), 1) is None
    assert rotated.constants(stack, signs(16), -1, get_quantizer("nvfp4")) is None


def test_both_layouts_of_an_operand_rotated_for_one_matmul_come_from_one_pass():
    """The input and the gradient of `nvfp4`: unrotated along rows, and rotated down columns."""
    spec = next(rule.linear for rule in get_recipe("nvfp4").rules if rule.linear.rounds)
    size = spec.grad_weight.hadamard.size
    for quantizer in (spec.grad_weight.lhs, spec.grad_weight.rhs):
        assert turned.constants(torch.empty(256, 128, device=META), quantizer, signs(size)) is not None
        assert turned.constants(torch.empty(250, 128, device=META), quantizer, signs(size)) is None  # partial blocks
        assert turned.constants(torch.empty(256, 128, device=META), quantizer, signs(64)) is None
        assert turned.constants(torch.empty(256, 128, device=META), quantizer.down, signs(size)) is None


def test_shapes_are_padded_to_whole_blocks():
    x, hadamard = torch.empty(70, 45, device=META), Hadamard(16)
    assert rotated.whole_shape(x, hadamard.size, 1) == (70, 48)
    assert rotated.whole_shape(x, hadamard.size, 0) == (80, 45)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "seed"), [(PINNED, 0), (OLDEST, 1)])
def test_random_rotations_equal_the_reference_in_the_interpreter(version, seed):
    assert_all_equal(json_lines("fuzzed_rotated.py", version, "--seed", str(seed), TRITON_INTERPRET="1"), version)
