"""Random Hadamard transforms: orthogonal to the last bit, and no change to a matmul."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from halfstep.errors import QuantizationError
from halfstep.quant import Hadamard, Scales, Tile, get_quantizer, rotate
from halfstep.quant.scaling import get_scaling


SIZES = [2, 4, 8, 16, 32, 64, 128]
NVFP4 = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def sylvester(size):
    """The Hadamard matrix by its recursion, in integers."""
    if size == 1:
        return [[1]]
    half = sylvester(size // 2)
    return [row + row for row in half] + [row + [-value for value in row] for row in half]


def signs(size, seed=3):
    return Hadamard(size, seed).signs()


def test_default_signs_are_those_of_nvfp4():
    assert Hadamard().signs().tolist() == NVFP4


@pytest.mark.parametrize("size", SIZES)
def test_rotating_the_identity_gives_the_matrix_of_the_definition(size):
    s = signs(size)
    found = rotate(torch.eye(size), s)
    scale = Fraction(torch.tensor(size**-0.5).item())
    expected = [[int(sign) * value * scale for value in row] for sign, row in zip(s, sylvester(size), strict=True)]
    assert [[Fraction(value) for value in row] for row in found.tolist()] == expected


@pytest.mark.parametrize("size", SIZES)
def test_the_transform_is_orthogonal_to_the_last_bit_of_float32(size):
    """Exactly where 1 / sqrt(size) is a power of two; else but for the rounding of that factor."""
    rotation = rotate(torch.eye(size), signs(size))
    scale = torch.tensor(size**-0.5)
    whole = rotation / scale
    assert torch.equal(whole.abs() * scale, rotation.abs())
    assert whole.abs().eq(1).all()
    assert torch.equal(whole @ whole.t(), torch.eye(size) * size)
    assert abs(float(scale.double() ** 2 * size) - 1) <= 2**-24 * 2
    if math.isqrt(size) ** 2 == size:
        assert torch.equal(rotation @ rotation.t(), torch.eye(size))


@pytest.mark.parametrize("size", [4, 16, 64])
def test_rotating_twice_restores_integers_exactly(size):
    """Sums of integers are exact, so no rounding hides an error of the rotation."""
    x = torch.randint(-1000, 1000, (5, 3 * size)).float()
    s = signs(size)
    back = rotate(rotate(x, s), torch.ones(size)) * s.repeat(3)  # H and the signs are their own inverses
    assert torch.equal(back, x)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("length", [32, 20, 1, 0])
def test_rotating_both_operands_keeps_a_matmul_for_any_length(dim, length):
    """A short block is padded with zeros; integers make the comparison exact."""
    shape = (length, 5) if dim == 0 else (5, length)
    a, b = (torch.randint(-9, 9, shape).float() for _ in range(2))
    s = Hadamard().signs()
    left, right = rotate(a, s, dim), rotate(b, s, dim)
    assert left.shape[dim] == -(-length // 16) * 16
    if dim == 0:
        assert torch.equal(left.t() @ right, a.t() @ b)
    else:
        assert torch.equal(left @ right.t(), a @ b.t())


def test_rotating_an_inner_dimension():
    x = torch.randn(2, 32, 3)
    expected = rotate(x.movedim(1, -1), signs(16)).movedim(-1, 1)
    assert torch.equal(rotate(x, signs(16), dim=1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_in_float32_or_float64(dtype):
    x = torch.randn(4, 32).to(dtype)
    found = rotate(x, signs(16))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found, rotate(x.to(found.dtype), signs(16)))


def test_signs_are_a_function_of_the_seed():
    assert torch.equal(signs(32, 1), signs(32, 1))
    assert not torch.equal(signs(32, 1), signs(32, 2))
    assert abs(sum(float(signs(16, seed).sum()) for seed in range(500))) < 4 * math.sqrt(500 * 16)
    drawn = Hadamard(16, "random")
    torch.manual_seed(0)
    first, second = drawn.signs(), drawn.signs()
    torch.manual_seed(0)
    assert torch.equal(drawn.signs(), first)
    assert not torch.equal(first, second)
    assert first.abs().eq(1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 12, "seed": 0}, "size 12: expected a power of two"),
        ({"size": 1, "seed": 0}, "size 1: expected a power of two"),
        ({"size": 16.0}, "size 16.0: expected a power of two"),
        ({"size": 32}, "NVFP4's signs are 16; give a seed"),
        ({"seed": "always"}, "expected an integer, 'random' or none"),
        ({"seed": True}, "seed = True"),
    ],
)
def test_invalid_transforms_raise(options, message):
    with pytest.raises(QuantizationError, match=message):
        Hadamard(**options)


def crest_factor(x):
    return float(x.abs().max() / x.pow(2).mean().sqrt())


def test_rotation_lowers_the_crest_factor_of_an_outlier():
    """The crest factor (amax / rms) of a block of 16 with one outlier falls from nearly sqrt(16) to nearly 1."""
    x = torch.randn(16) * 0.05
    x[5] = 3.0
    before, after = crest_factor(x), crest_factor(rotate(x, Hadamard().signs()))
    assert 3.8 < before <= 4
    assert 1 <= after < 1.4


def error(x, tile, size):
    """The relative error of FP4 with a float32 scale for each `tile` elements, after a rotation of blocks of `size`."""
    quantizer = replace(get_quantizer("mxfp4"), scales=Scales(Tile(1, tile), get_scaling("absmax")))
    rotated = x if size is None else rotate(x, Hadamard(size, 7).signs())
    return float((quantizer(rotated) - rotated).norm() / rotated.norm())


def test_rotation_lowers_the_error_only_under_much_larger_scale_blocks():
    """With two of 1024 channels 30 times as large, a rotation of 16 raises the error of 16-blocks and lowers that of
    one scale per row."""
    x = torch.randn(256, 1024)
    x[:, [100, 700]] *= 30
    assert error(x, 16, 16) > 1.2 * error(x, 16, None)
    assert abs(error(x, 32, 1024) / error(x, 32, None) - 1) < 0.1
    errors = [error(x, 1024, size) for size in (None, 16, 128, 1024)]
    assert errors[0] > 2 * errors[1] > 2 * errors[2] > 2 * errors[3] * 0.99
    normal = torch.randn(256, 1024)
    assert abs(error(normal, 16, 16) / error(normal, 16, None) - 1) < 0.03
