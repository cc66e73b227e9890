"""The CPU kernels for rows with power-of-two scales, and for such rows of a transposed view, equal the reference."""

import itertools

import pytest
import torch

from families import for_each, slow_unless
from halfstep import formats
from halfstep.kernels.cpu import blocks as kernel, panels, tiles
from halfstep.ops.casts import values, values_noted
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW
from kernels.test_cpu_blocks import hard
from kernels.test_cpu_columns import EXPONENTS, down, has_small
from oracles.numbers import same_bits


FORMATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "e3m2fn", "ocp_int8", "uint4")
DTYPES = (torch.float32, torch.bfloat16)
OTHERS = ("e4m3fnuz", "ocp_int8", "uint4")
"""Formats of another kernel; each input and output dtype is another compilation."""


def by_rows(name="e4m3fn", rule="rceil", rounding="nearest_even"):
    return Quantizer(formats.get(name), rounding, scales=Scales(ROW, get_scaling(rule)))


def assert_rounds(x, quantizer, dtypes=DTYPES):
    """The matrix and its transposed view give the reference's values, and agree on whether some are subnormal in
    bf16."""
    expected = quantizer.quantize(x)
    for dtype in dtypes:
        along, across = torch.full(x.shape, 7.0, dtype=dtype), torch.full(x.shape, 7.0, dtype=dtype)
        noted = kernel.run_values(x, along, quantizer, None)
        assert noted is not None
        same_bits(along, expected.dequantize(dtype))
        assert noted or not has_small(along)
        assert panels.run_view(down(x), across, quantizer) == (None if x.shape[1] % 32 else noted)
        if not x.shape[1] % 32:
            same_bits(across, along)
    return noted


@pytest.mark.quick("e5m2-dtype4-into4", "e5m2-dtype7-into7", "e3m2fn-dtype16-into16")
@pytest.mark.parametrize(
    ("name", "dtype", "into"),
    slow_unless(lambda case: case[0] not in OTHERS, itertools.product(FORMATS, DTYPES, DTYPES)),
)
@for_each("rule", ["rceil", "floor"])
def test_every_kind_of_format_equals_the_reference(name, rule, dtype, into):
    drawn = torch.randn(17, 512, generator=torch.Generator().manual_seed(1))
    assert_rounds(hard(512, dtype), by_rows(name, rule), [into])
    assert not assert_rounds(drawn.to(dtype), by_rows(name), [into])


@for_each("shape", [(1, 32), (31, 64), (17, 1056), (129, 544), (300, 96), (5, 1), (7, 33), (1, 1)])
def test_odd_shapes_equal_the_reference(shape):
    """A partial register; a rest of rows, of columns, of a thread's part."""
    assert not assert_rounds(torch.randn(shape, generator=torch.Generator().manual_seed(2)), by_rows())


@pytest.mark.parametrize("exponents", EXPONENTS)
def test_every_power_of_two_scale_equals_the_reference(exponents):
    @for_each("exponent", exponents)
    def check(exponent):
        x = torch.randn(40, 32, generator=torch.Generator().manual_seed(exponent + 149))
        x = ((x / x.abs().amax(1, keepdim=True)).double() * 2.0**exponent).float()
        for name in ("e4m3fn", "e5m2"):
            assert_rounds(x, by_rows(name))
            mixed = x.clone()
            mixed[::2] = 1.0
            assert_rounds(mixed, by_rows(name))

    check()


def test_the_largest_float32_is_rounded_like_the_reference():
    x = torch.full((2, 32), torch.finfo(torch.float32).max)
    assert_rounds(x, by_rows("e5m2"))


def test_zeros_keep_their_sign_and_nonfinite_rows_are_nan():
    x = torch.ones(5, 64)
    x[1], x[2], x[3, 7], x[4, 9] = 0.0, -0.0, torch.nan, torch.inf
    assert not assert_rounds(x, by_rows())
    out = values(x, by_rows())
    assert out[2].signbit().all()
    assert out[3:].isnan().all()
    x[1] = 2.0**-120
    assert assert_rounds(x, by_rows())


@for_each("name", ["e4m3fn", "e5m2", "e2m1fn"])
def test_the_row_kernel_equals_the_tile_kernel(name):
    """Before the row kernel, the tile kernel rounded such rows."""
    x, quantizer = hard(512).nan_to_num(1.0), by_rows(name)
    before, now = torch.empty(x.shape, dtype=torch.bfloat16), torch.empty(x.shape, dtype=torch.bfloat16)
    assert tiles.run(x, before, quantizer, None) is not None
    kernel.run_values(x, now, quantizer, None)
    same_bits(before, now)


def test_a_traced_graph_equals_the_reference():
    quantizer, x = by_rows(), torch.randn(64, 40)
    for view in (lambda x: x, lambda x: x.t()):
        traced = torch.compile(lambda x, view=view: values(view(x), quantizer), backend="aot_eager", fullgraph=True)
        same_bits(traced(x), quantizer.quantize(view(x).contiguous()).dequantize())


def test_other_views_are_copied_and_equal_the_reference():
    x = torch.randn(6, 64, 40)
    for view in (x[:, 3:], x.transpose(1, 2), x[0, :33].t(), x[0, :, ::2].t(), x[:1, :, :1].expand(6, 64, 32)):
        out, _ = values_noted(view, by_rows())
        same_bits(out, by_rows().quantize(view.contiguous()).dequantize())


def test_unsupported_calls_are_refused():
    x, out = torch.ones(64, 32), torch.empty(64, 32)
    assert kernel.run_values(x, out, by_rows(), None) is not None
    assert kernel.run_values(x[:0], out[:0], by_rows(), None) is None
    assert panels.run_view(x.t(), x.new_empty(32, 64).t(), by_rows()) is None
    for quantizer in (
        by_rows(rounding="stochastic"),
        by_rows(rounding="nearest_up"),
        by_rows(rule="current"),
        by_rows().down,
        by_rows("bf16"),
        Quantizer(formats.get("e4m3fn")),
    ):
        assert kernel.run_values(x, out, quantizer, None) is None
    assert kernel.run_values(x, out.half(), by_rows(), None) is None
    assert kernel.run_values(x, x, by_rows(), None) is None
    assert kernel.run_values(x.double(), out, by_rows(), None) is None
    assert kernel.run_values(x[:, ::2], out[:, ::2], by_rows(), None) is None
