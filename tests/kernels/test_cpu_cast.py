"""The CPU kernel for rounding values equals the reference, bit for bit."""

import itertools

import pytest
import torch

from families import in_turn, slow_unless
from halfstep import formats
from halfstep.formats import Integer
from halfstep.kernels.cpu import cast as kernel
from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.quant.cast import encode, round_to
from halfstep.quant.scaling.delayed import current, delayed
from kernels.inputs import OVERFLOWS, ROUNDINGS, all_formats, float32_input, inputs
from oracles.numbers import same_bits


PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
]
FLOATS = {"float8_e4m3fn", "bf16"}
"""Formats tested fast with 16-bit tensors too, since each is another compilation."""


def assert_rounds(x, out, format, rounding, overflow):
    seed = 99 if rounding == "stochastic" else None
    kernel.run(x, out, format, rounding, overflow, seed)
    same_bits(out, round_to(x, format, rounding, overflow, seed, dtype=out.dtype))


@pytest.mark.quick(
    "posit32_2-float32-float32",
    "dynamic8_unsigned-float32-float32",
    "int8-bfloat16-bfloat16",
    "posit8_2-float32-float32",
    "af4-float32-float32",
    "e2m0-float32-float32",
)
@pytest.mark.parametrize(
    ("format", "pair"),
    slow_unless(
        lambda case: (
            case[1] == PAIRS[0]
            or (case[0].name in FLOATS and case[1] != PAIRS[2])
            or (case[0].name, case[1]) in (("float8_e4m3fn", PAIRS[2]), ("int8", PAIRS[1]))
        ),
        itertools.product(all_formats(), PAIRS),
    ),
    ids=lambda part: f"{part[0]}-{part[1]}".replace("torch.", "") if isinstance(part, tuple) else part.name,
)
def test_every_format_rounding_and_overflow_equals_the_reference(format, pair):
    x = inputs(format, pair[0])
    out = torch.empty(x.shape, dtype=pair[1])
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            if kernel.run(x, out, format, rounding, overflow, 1):
                assert_rounds(x, out, format, rounding, overflow)


@pytest.mark.parametrize(
    "name", ["e4m3fn", "e5m2", "e2m1fn", "e5m3", "tf32", "bf16", "fp16", "int8", "float8_e5m2fnuz"]
)
def test_common_formats_are_supported(name):
    x, format = torch.zeros(3), formats.get(name)
    assert kernel.run(x, torch.empty(3), format, "nearest_even", "saturate", 1)
    assert kernel.run(x.bfloat16(), x.bfloat16(), format, "stochastic", "saturate", 1)
    few = isinstance(format, Integer) or format.mantissa_bits <= 7
    assert kernel.run(x, x.bfloat16(), format, "nearest_even", "saturate", None) == few


IN_PLACE = ["nearest_even", "toward_zero", "stochastic"], [torch.bfloat16, torch.float32], ["e4m3fn", "int8"]


@pytest.mark.parametrize(
    ("rounding", "dtype", "name"), slow_unless(in_turn(*IN_PLACE).__contains__, itertools.product(*IN_PLACE))
)
def test_rounding_in_place_equals_the_reference(rounding, dtype, name):
    x = float32_input().to(dtype)
    expected = round_to(x, name, rounding, generator=4)
    kernel.run(x, x, formats.get(name), rounding, "saturate", 4)
    same_bits(x, expected)


@pytest.mark.quick("1-0", "2-0", "2-16385")
@pytest.mark.parametrize("size", [0, 1, 2, 15, 16, 17, 31, 33, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_sizes_and_threads_equal_the_reference(size, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(size, generator=torch.Generator().manual_seed(size))
        for rounding in ("nearest_even", "stochastic"):
            out = torch.full((size + 1,), 7.0)  # one element more than is written
            assert_rounds(x, out[:size], formats.get("e4m3fn"), rounding, "saturate")
            assert out[size] == 7
    finally:
        torch.set_num_threads(before)


@pytest.mark.quick("1-fp32-e4m3fn-moved", "1-bf16-e5m2-none", "2-fp32-e4m3fn-first")
@pytest.mark.parametrize("state", ["none", "first", "moved"])
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_rounding_with_a_scale_of_a_state_or_the_tensors_amax(threads, dtype, name, state):
    """Values, codes, the scale and the recorded amax."""
    format, rule = formats.get(name), current if state == "none" else delayed
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size, power in ((7, 0), (CHUNK + 5, -3), (3, -140), (CHUNK + 1, float("nan"))):
            x = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 2.0**power
            x = x.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
            own = None if state == "none" else torch.tensor([0.0 if state == "first" else 3.0, 0.25, 0.0])
            amax = x.abs().amax().float()
            factor = current.factor(amax, format) if state != "moved" else own[0].clone()
            for record in (False, True):
                found = kernel.run_whole(x, torch.bfloat16, format, "nearest_even", rule, own, record, coded=True)
                values, scale, codes = found
                same_bits(values, round_to(x.float() * factor, format, dtype=torch.bfloat16))
                same_bits(scale, factor.reciprocal())
                if format.has_nan:
                    assert torch.equal(codes, encode(values.float(), format))
                else:
                    assert codes is None
                if own is not None:
                    expected = torch.maximum(amax, torch.tensor(0.25)) if record else torch.tensor(0.25)
                    same_bits(own[1], expected)
    finally:
        torch.set_num_threads(before)


def test_any_shape_equals_the_reference():
    x = torch.randn(3, 1, 5, 7)
    assert_rounds(x, torch.empty_like(x), formats.get("e5m2"), "nearest_even", "saturate")
    assert_rounds(x[0, 0, 0, 0], torch.empty(()), formats.get("e5m2"), "nearest_even", "saturate")


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.zeros(4, 2)[:, 0], torch.zeros(4)),
        (torch.zeros(4), torch.zeros(4, 2)[:, 0]),
        (torch.zeros(4), torch.zeros(5)),
        (torch.zeros(4).double(), torch.zeros(4).double()),
        (torch.zeros(4, device="meta"), torch.zeros(4)),
        (torch.zeros(4).as_subclass(Subclass), torch.zeros(4)),
        (torch.zeros(4).to_sparse(), torch.zeros(4)),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4)),
    ],
)
def test_unsupported_tensors_are_refused(x, out):
    assert not kernel.run(x, out, formats.get("e4m3fn"), "nearest_even", "saturate", None)


def test_overlapping_tensors_and_unsupported_formats_are_refused():
    x = torch.zeros(10)
    assert not kernel.run(x[:8], x[2:], formats.get("e4m3fn"), "nearest_even", "saturate", None)
    for name in ("fp32", "nf4", "e8m0fnu"):
        assert not kernel.run(x, torch.zeros(10), formats.get(name), "nearest_even", "saturate", None)
    assert not kernel.run(x, x.bfloat16(), formats.get("fp16"), "nearest_even", "saturate", None)
    assert not kernel.run(x.bfloat16(), x.bfloat16(), formats.get("fp16"), "nearest_even", "ieee", None)
