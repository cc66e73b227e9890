"""The CPU kernel for blocks down the columns of a matrix equals the reference on the transposed matrix, bit for bit."""

import itertools

import pytest
import torch

from families import for_each, slow_unless
from halfstep import formats
from halfstep.kernels.cpu import blocks, panels as kernel
from halfstep.ops.casts import values
from halfstep.quant import Scales
from halfstep.quant.quantizer import Quantizer, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import Tile
from kernels.test_cpu_blocks import hard
from oracles.numbers import same_bits


SMALLEST = torch.finfo(torch.bfloat16).smallest_normal
POWERS = [
    (name, rule)
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
    for rule in formats.get_block(name).rules
]
POWERS += [("fp8_1x128", "rceil")]


def down(x):
    """The same matrix as the transposed view of a contiguous one."""
    return x.t().contiguous().t()


def assert_rounds(x, quantizer, dtypes=(torch.float32, torch.bfloat16)):
    """The kernels for columns and for rows give the reference's values, and agree on whether some are subnormal in
    bf16."""
    expected = quantizer.quantize(x)
    for dtype in dtypes:
        out, rows = torch.full(x.shape, 7.0, dtype=dtype), torch.full(x.shape, 7.0, dtype=dtype)
        noted = kernel.run_view(down(x), out, quantizer)
        assert noted is not None
        same_bits(out, expected.dequantize(dtype))
        assert blocks.run_values(x, rows, quantizer, None) == noted
        same_bits(rows, out)
        assert noted or not has_small(out)
    return noted


def has_small(x):
    """Whether some nonzero values are flushed to zero by bf16 matmuls."""
    return bool(((x != 0) & (x.abs() < SMALLEST)).any())


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_compiled(case):
    """Whether the fast tests compile this case: each input and each output dtype is another kernel, each tested
    once."""
    (name, rule), dtype, into = case
    if dtype != torch.float32:
        return (name, rule, dtype, into) == ("mxfp8_e4m3", "rceil", torch.bfloat16, torch.bfloat16)
    return name != "mxint8"


@pytest.mark.quick(
    "('mxfp8_e4m3', 'even')-torch.float32-torch.float32",
    "('mxfp8_e4m3', 'rceil')-torch.float32-torch.float32",
    "('mxfp8_e5m2', 'even')-torch.float32-torch.float32",
)
@pytest.mark.parametrize(
    ("case", "dtype", "into"), slow_unless(is_compiled, itertools.product(POWERS, DTYPES, DTYPES[:2])), ids=str
)
def test_every_format_with_power_of_two_scales_equals_the_reference(case, dtype, into):
    name, rule = case
    quantizer, normal = get_quantizer(name, scale=rule), torch.nn.functional.layer_norm(hard(512), (512,))
    assert_rounds(hard(512, dtype), quantizer, [into])
    assert not assert_rounds(normal.nan_to_num(1.0).to(dtype), quantizer, [into])


def test_a_scaling_with_a_margin_equals_the_reference():
    rule = get_scaling("rceil", margin=3)
    assert_rounds(hard(512)[:17], Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 32), rule)))


@pytest.mark.slow  # another compilation
def test_float16_equals_the_reference():
    assert_rounds(hard(512, torch.float16), get_quantizer("mxfp8_e4m3", scale="rceil"), (torch.float32,))


ELEMENTS = dict.fromkeys(("e4m3fn", "e5m2", "e2m1fn", "e3m2fn"), 128)
ELEMENTS |= dict.fromkeys(("e4m3fnuz", "ocp_int8", "int8", "uint4"), 32)
"""Formats with the block size of the fast test: 32 for those whose kernel `mxint8` has compiled."""


@pytest.mark.quick("128-e5m2-floor-dtype68", "128-e2m1fn-floor-dtype72")
@pytest.mark.parametrize(
    ("size", "name", "rule", "dtype"),
    slow_unless(
        lambda case: (case[0], *case[2:]) == (ELEMENTS[case[1]], "floor", torch.float32),
        itertools.product([16, 32, 128, 256], ELEMENTS, ["floor", "rceil"], [torch.float32, torch.bfloat16]),
    ),
)
def test_every_block_size_equals_the_reference(size, name, rule, dtype):
    quantizer = Quantizer(formats.get(name), scales=Scales(Tile(1, size), get_scaling(rule)))
    assert_rounds(hard(512)[:17], quantizer, (dtype,))


@pytest.mark.parametrize("shape", [(1, 32), (31, 64), (33, 1056), (129, 544), (300, 96)])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4"])
def test_odd_shapes_equal_the_reference(name, shape):
    """A partial register; a rest of rows, of columns, of a thread's part."""
    assert not assert_rounds(torch.randn(shape, generator=torch.Generator().manual_seed(2)), get_quantizer(name))


EXPONENTS = [
    pytest.param([*range(-149, -119), *range(-119, 120, 9), *range(120, 128)], id="ends"),
    pytest.param(range(-149, 128), marks=pytest.mark.slow, id="every"),
]
"""Powers of two of float32, all of them at the ends of the range of scales."""


@pytest.mark.parametrize("exponents", EXPONENTS)
def test_every_power_of_two_scale_equals_the_reference(exponents):
    """Blocks whose amax is each power of two, between blocks of ordinary size or alone."""

    @for_each("exponent", exponents)
    def check(exponent):
        x = torch.randn(40, 32, generator=torch.Generator().manual_seed(exponent + 149))
        x = (x / x.abs().amax(1, keepdim=True)).double() * 2.0**exponent
        for quantizer in (get_quantizer("mxfp8_e4m3", scale="rceil"), get_quantizer("mxfp8_e5m2")):
            assert_rounds(x.float(), quantizer)
            mixed = x.float()
            mixed[::2] = 1.0
            assert_rounds(mixed, quantizer)

    check()


def test_subnormal_results_are_reported_but_not_zeros():
    quantizer, x = get_quantizer("mxfp8_e4m3", scale="rceil"), torch.ones(40, 64)
    x[3], x[4, 32:] = 0.0, -0.0
    assert not assert_rounds(x, quantizer)
    x[5] = torch.nan
    x[6, 9] = torch.inf
    assert not assert_rounds(x, quantizer)
    x[7, 32:] = 2.0**-108  # its scale is 2^-116: no element but 0 is below 2^-125
    assert not assert_rounds(x, quantizer)
    x[7, 32:] = 2.0**-110
    assert assert_rounds(x, quantizer)


def test_unsupported_calls_are_refused():
    x, out = torch.zeros(64, 40).t(), torch.empty(40, 64)
    quantizer = get_quantizer("mxfp8_e4m3")
    assert kernel.run_view(x, out, quantizer) is not None
    assert kernel.run_view(x.contiguous(), out, quantizer) is None
    assert kernel.run_view(x.double(), out, quantizer) is None
    assert kernel.run_view(x, out.half(), quantizer) is None
    assert kernel.run_view(x, out[:39], quantizer) is None
    assert kernel.run_view(x, out.t().contiguous().t(), quantizer) is None
    assert kernel.run_view(x[:, :33], torch.empty(40, 33), quantizer) is None
    assert kernel.run_view(x[::2], out[::2], quantizer) is None
    assert kernel.run_view(x[:0], out[:0], quantizer) is None
    assert kernel.run_view(x[None], out[None], quantizer) is None
    same = torch.zeros(64, 64)
    assert kernel.run_view(same.t(), same, quantizer) is None
    for other in (
        get_quantizer("mxfp8_e4m3", rounding="stochastic"),
        get_quantizer("nvfp4"),
        get_quantizer("fp8_1x128"),
        get_quantizer("fp8_128x128", scale="rceil"),
    ):
        assert kernel.run_view(torch.zeros(128, 128).t(), torch.empty(128, 128), other) is None


QUANTIZERS = {
    "blocks": get_quantizer("mxfp8_e4m3", scale="rceil"),
    "stochastic": get_quantizer("mxfp8_e4m3", rounding="stochastic"),
    "squares": get_quantizer("fp8_128x128", scale="rceil"),
    "down": get_quantizer("mxfp8_e4m3", scale="rceil").down,
    "nf4": get_quantizer("nf4"),
}
VIEWS = {
    "transposed": lambda x: x.t(),
    "a part of one": lambda x: x[:, 3:67].t(),
    "every other": lambda x: x[:, ::2],
    "three dimensions": lambda x: x.view(2, -1, x.shape[1]).transpose(1, 2),
    "expanded": lambda x: x[:, :1].expand(-1, 64),
    "no rows": lambda x: x[:, :0].t(),
    "no columns": lambda x: x[:0].t(),
}


@pytest.mark.quick(
    "stochastic-no columns",
    "squares-no rows",
    "squares-no columns",
    "down-a part of one",
    "down-every other",
    "down-no rows",
    "down-no columns",
)
@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_values_of_a_view_equal_those_of_its_copy(view, name):
    quantizer = QUANTIZERS[name]
    x = view(torch.randn(128, 256, generator=torch.Generator().manual_seed(3)))
    same_bits(values(x, quantizer, 5), values(x.contiguous(), quantizer, 5))


def test_a_single_row_does_not_use_the_column_kernel(monkeypatch):
    """It is contiguous, but also the transposed view of a contiguous matrix."""
    monkeypatch.setattr(kernel, "run_view", None)
    quantizer, x = get_quantizer("mxfp8_e4m3", scale="rceil"), torch.randn(1, 64)
    same_bits(values(x, quantizer, dtype=torch.bfloat16), quantizer.quantize(x).dequantize(torch.bfloat16))


def test_a_traced_graph_rounds_views_like_eager():
    quantizer, x = get_quantizer("mxfp8_e4m3", scale="rceil"), torch.randn(64, 40)
    traced = torch.compile(
        lambda x: values(x.t(), quantizer, dtype=torch.bfloat16), backend="aot_eager", fullgraph=True
    )
    same_bits(traced(x), quantizer.quantize(x.t().contiguous()).dequantize(torch.bfloat16))


def test_storages_can_be_resized_after_the_kernel():
    """FSDP2 frees weights this way between their uses."""
    x, out = torch.zeros(64, 40), torch.empty(40, 64)
    mx = get_quantizer("mxfp8_e4m3")
    assert kernel.run_view(x.t(), out, mx) is not None
    for tensor in (x, out):
        tensor.untyped_storage().resize_(0)
