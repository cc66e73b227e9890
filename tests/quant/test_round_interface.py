"""The arguments of round_to: what they leave unchanged, what they accept, and errors."""

import pytest
import torch

from halfstep import Quantizer, formats, round_to
from halfstep.errors import FormatError, QuantizationError
from oracles.numbers import same_bits


every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
SHAPES = [(), (0,), (0, 3), (1,), (7,), (3, 5), (2, 3, 4, 5)]


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_round_to_keeps_shape_and_dtype_and_its_input(dtype, shape, rounding):
    x = torch.randn(shape).to(dtype)
    before = x.clone()
    result = round_to(x, "e4m3fn", rounding, generator=0)
    assert (result.shape, result.dtype) == (x.shape, dtype)
    same_bits(x, before)
    same_bits(result.reshape(-1), round_to(x.reshape(-1), "e4m3fn", rounding, generator=0))


@every_dtype
@pytest.mark.parametrize(
    "cut", [lambda x: x.t(), lambda x: x[::2, ::3], lambda x: x[:, 1], lambda x: x[:1].expand(4, 6)], ids="tscx"
)
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_strides_do_not_change_the_result(dtype, cut, rounding):
    x = cut(torch.randn(6, 6).to(dtype))
    same_bits(round_to(x, "e5m2", rounding, generator=4), round_to(x.contiguous(), "e5m2", rounding, generator=4))


@pytest.mark.parametrize("x", [torch.randn(4, 6).t(), torch.randn(0), torch.randn(()), torch.randn(5)])
def test_out_is_written_and_returned(x):
    expected = round_to(x, "bf16")
    out = torch.empty_strided(x.shape, x.stride())
    assert round_to(x, "bf16", out=out) is out
    same_bits(out, expected)
    assert round_to(x, "bf16", out=x) is x
    same_bits(x, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_requested_dtype(source, dtype):
    """Rounded once to the format; e4m3fn's values are exact in every dtype."""
    x = torch.randn(3, 50).to(source)
    expected = round_to(x.double(), "e4m3fn").to(dtype)
    out = torch.empty(3, 50, dtype=dtype)
    same_bits(round_to(x, "e4m3fn", dtype=dtype), expected)
    assert round_to(x, "e4m3fn", out=out) is out
    same_bits(out, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.bool])
def test_other_result_dtypes_raise(dtype):
    with pytest.raises(QuantizationError, match=f"values in {dtype} asked for; expected float64"):
        round_to(torch.zeros(3), "e4m3fn", dtype=dtype)


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(4),
        torch.empty(3, dtype=torch.int32),
        torch.empty(3).to(torch.float8_e5m2),
        torch.empty(3, device="meta"),
    ],
)
def test_an_unfit_out_raises(out):
    with pytest.raises(QuantizationError, match=r"out is .*; expected \(3,\) torch.float32 on cpu"):
        round_to(torch.zeros(3), "bf16", out=out)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_inputs_of_other_dtypes_raise(dtype):
    with pytest.raises(QuantizationError, match=f"got {dtype}; it takes float32, bfloat16"):
        round_to(torch.zeros(2).to(dtype), "bf16")


def test_a_tensor_that_requires_grad_raises_and_suggests_detach():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(QuantizationError, match=r"requires grad.*detach\(\).*halfstep.ops.fake_quantize"):
        round_to(x, "bf16")
    with torch.no_grad():
        same_bits(round_to(x, "bf16"), torch.ones(3))
    assert not round_to(x.detach(), "bf16").requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"format": "bf61"}, FormatError, "unknown format 'bf61'; nearest: bf16"),
        ({"format": "bf16", "rounding": "nearest"}, QuantizationError, "unknown rounding 'nearest'; nearest: nearest_"),
        ({"format": "bf16", "overflow": "wrap"}, QuantizationError, "unknown overflow 'wrap'.*ieee, saturate"),
    ],
)
def test_unknown_formats_roundings_and_overflows_raise(arguments, error, words):
    with pytest.raises(error, match=words):
        round_to(torch.zeros(3), **arguments)


def test_a_format_may_be_a_name_a_dtype_or_a_format():
    x = torch.randn(100)
    expected = x.bfloat16().float()
    for format in ("bf16", "bfloat16", torch.bfloat16, formats.get("bf16")):
        same_bits(round_to(x, format), expected)


@pytest.mark.parametrize("rounding", ["nearest_away", "stochastic"])
def test_a_quantizer_equals_round_to_with_its_arguments(rounding):
    quantizer = Quantizer(formats.get("e4m3fn"), rounding, "ieee")
    x = torch.randn(64) * 300
    same_bits(quantizer(x, 7), round_to(x, "e4m3fn", rounding, "ieee", generator=7))
    assert not torch.equal(quantizer(x, 7).nan_to_num(), x)
