"""The CPU kernel for posits equals the reference, bit for bit."""

import itertools

import pytest
import torch

from families import slow_unless
from halfstep import formats
from halfstep.kernels.cpu import posit as kernel
from halfstep.quant.cast import CONTAINERS, encode, round_to
from kernels.inputs import inputs
from oracles.numbers import same_bits


NAMES = ["posit8_0", "posit8_1", "posit8_2", "posit16_1", "posit16_2", "posit3_0", "posit7_3", "posit11_1", "posit22_2"]
every_posit = pytest.mark.parametrize("name", NAMES)


@pytest.mark.quick("dtype0-posit8_1", "dtype0-posit8_2", "dtype0-posit3_0")
@every_posit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_posit_values_equal_the_reference(name, dtype):
    format = formats.get(name)
    x = inputs(format, dtype)
    out = torch.empty_like(x)
    assert kernel.run(x, out, format, "nearest_even")
    same_bits(out, round_to(x, format))
    assert kernel.run(x, x, format, "nearest_even")
    same_bits(x, out)


@pytest.mark.quick("posit8_2-dtype7", "posit8_2-dtype8", "posit22_2-dtype24")
@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_unless(
        lambda case: case[1] == torch.float32 or case[0] == "posit8_2",  # another kernel to compile for each container
        itertools.product(NAMES, [torch.float32, torch.bfloat16, torch.float16]),
    ),
)
def test_posit_codes_equal_the_reference(name, dtype):
    format = formats.get(name)
    x = inputs(format, dtype)
    out = torch.empty(x.shape, dtype=CONTAINERS[format.storage_bits])
    assert kernel.run(x, out, format, "nearest_even")
    assert torch.equal(out.long(), encode(x, format).long())


def test_posits_in_16_bit_tensors_equal_the_reference():
    x = inputs(formats.get("posit8_2"), torch.float32)
    for name, dtype in (("posit8_2", torch.bfloat16), ("posit8_0", torch.float16)):
        out = torch.empty(x.shape, dtype=dtype)
        assert kernel.run(x, out, formats.get(name), "nearest_even")
        same_bits(out, round_to(x, name, dtype=dtype))


def test_posits_that_are_inexact_in_the_output_are_refused():
    x = torch.zeros(3)
    for name in ("posit32_2", "posit8_5", "e4m3fn"):
        assert not kernel.run(x, torch.zeros(3), formats.get(name), "nearest_even")
    assert not kernel.run(x, torch.zeros(3), formats.get("posit8_2"), "toward_zero")
    assert not kernel.run(x, x.bfloat16(), formats.get("posit16_2"), "nearest_even")
    assert not kernel.run(x, x.half(), formats.get("posit8_2"), "nearest_even")
