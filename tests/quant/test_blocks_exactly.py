"""Block formats equal the oracle bit for bit: codes, scales, packing and dequantized values."""

import itertools

import numpy as np
import pytest
import torch

from families import for_each, in_turn, slow_unless
from halfstep import formats
from halfstep.kernels.selftest.tiles import tied
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.scaling import get_scaling
from oracles import blocks, formats as oracle
from oracles.numbers import same_bits


RULES = [
    *((name, rule) for rule, name in itertools.product(blocks.POWERS_OF_TWO, blocks.MX)),
    *(("nvfp4", rule) for rule in ("two_level", "two_level_up", "four_over_six")),
    *((name, rule) for name in ("fp8_1x128", "fp8_128x128") for rule in ("absmax", "rceil")),
    *((name, rule) for name in ("nf4", "bnb_fp4", "af4") for rule in ("absmax", "double_absmax")),
    *((name, "absmax") for name in ("dynamic8", "int8_tensor", "int8_row", "llm_int8", "int4_64")),
    *((name, "affine") for name in ("uint8_row", "uint4_64")),
]
IDS = ["-".join(pair) for pair in RULES]
every_rule = pytest.mark.parametrize(("name", "rule"), RULES, ids=IDS)
every_block = pytest.mark.parametrize("name", blocks.BLOCKS)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize(
    ("name", "rule", "dtype"),
    slow_unless(
        [(*pair, dtype) for pair, dtype in in_turn(RULES, DTYPES)].__contains__,
        [(*pair, dtype) for pair, dtype in itertools.product(RULES, DTYPES)],
    ),
)
ONE_TILE = [name for name, (_, tile, _) in blocks.BLOCKS.items() if tile[0] == 1 and tile[1]]


def assert_like_oracle(name, rule, x):
    """Quantize x, and compare all stored tensors and the dequantized values with the oracle's."""
    found = get_quantizer(name, scale=rule).quantize(x)
    matrix = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    wide = matrix.numpy() if x.dtype in (torch.float32, torch.float64) else matrix.float().numpy()
    expected = blocks.quantize(name, wide, rule)
    for key, value in expected.stored.items():
        wanted = torch.from_numpy(np.asarray(value))
        if key == "outliers":
            wanted = wanted.to(x.dtype)
        if key == "scale" and wanted.dtype == torch.uint8 and name == "nvfp4":
            nan = (wanted & 0x7F) == 0x7F  # either NaN
            torch.testing.assert_close(found.tensors[key] & 0x7F == 0x7F, nan, rtol=0, atol=0)
            torch.testing.assert_close(found.tensors[key][~nan], wanted[~nan], rtol=0, atol=0)
        else:
            torch.testing.assert_close(found.tensors[key], wanted, rtol=0, atol=0, equal_nan=True)
    known = expected.codes >= 0
    if known.all():
        element = blocks.BLOCKS[name][0]
        packed = blocks.pack(expected.codes, oracle.listed(element).bits, element in blocks.HIGH_NIBBLE_FIRST)
        torch.testing.assert_close(found.codes, torch.from_numpy(packed).to(torch.uint8), rtol=0, atol=0)
    limit = torch.finfo(x.dtype).max
    values = torch.from_numpy(expected.values).clamp(-limit, limit).to(x.dtype).view(x.shape)
    torch.testing.assert_close(found.dequantize(), values, rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.quick(
    "fp8_128x128-absmax-dtype117",
    "fp8_128x128-rceil-dtype122",
    "int8_tensor-absmax-dtype154",
    "int8_row-absmax-dtype159",
    "llm_int8-absmax-dtype160",
    "uint8_row-affine-dtype170",
    "uint4_64-affine-dtype175",
)
@every_dtype
def test_normal_values_of_many_magnitudes(name, rule, dtype):
    """Rows of 200 elements in blocks of every length, the last ones short; each row of another order of magnitude."""
    rows = 3 if rule == "four_over_six" else 12
    random = np.random.default_rng(3)
    x = random.standard_normal((rows, 200)) * 10.0 ** random.integers(-4, 4, (rows, 1))
    assert_like_oracle(name, rule, torch.from_numpy(x).to(dtype))


@pytest.mark.quick("int4_64-absmax", "uint8_row-affine", "uint4_64-affine")
@every_rule
@for_each("shape", [(1, 1), (3, 7), (2, 3, 40), (5,), (130, 131)])
def test_blocks_of_any_shape(name, rule, shape):
    if blocks.BLOCKS[name][1][0] == 1 and shape[0] == 130:
        shape = (9, 131)
    assert_like_oracle(name, rule, torch.randn(shape))


@every_rule
def test_double_quantized_scales_of_several_groups(name, rule):
    if rule != "double_absmax":
        return
    assert_like_oracle(name, rule, torch.randn(70, 64 * 5 - 3))


@pytest.mark.quick("floor-mxfp8_e4m3", "ceil-mxfp8_e4m3", "even-mxfp8_e4m3", "even-fp8_1x128", "rceil-fp8_1x128")
@pytest.mark.parametrize("name", [*blocks.MX, "fp8_1x128"])
@pytest.mark.parametrize("rule", blocks.POWERS_OF_TWO)
@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_power_of_two_scales_around_every_threshold(name, rule, dtype):
    """One block for each amax: the element's max and every bound of a rule times powers of two, with neighbors."""
    if name == "fp8_1x128" and rule != "rceil":
        return
    element, (_, columns), _ = blocks.BLOCKS[name]
    top, bits = oracle.listed(element).max, blocks.MANTISSA[element]
    points = [1.0, top, 2 - 2.0 ** -(bits + 1), 2 - 2.0**-bits, 1.5, 1.9, 7.0]
    powers = [-149, -127, -126, 0, 100, 119, 126, 127]
    values = [p * 2.0**k for p in points for k in powers]
    amax = torch.tensor([v for v in values if v < 2.0**128], dtype=torch.float64).to(dtype)
    up, down = (torch.nextafter(amax, torch.full_like(amax, e)) for e in (torch.inf, 0.0))
    amax = torch.cat([amax, up, down])
    amax = amax[amax.isfinite()]
    x = torch.randn(len(amax), columns, dtype=torch.float64).clamp(-1, 1).to(dtype) * amax[:, None] * 0.9
    x[:, 3] = -amax
    assert_like_oracle(name, rule, x)


@pytest.mark.quick(
    "fp8_128x128-absmax-dtype117",
    "fp8_128x128-rceil-dtype122",
    "nf4-absmax-dtype127",
    "bnb_fp4-absmax-dtype133",
    "int8_tensor-absmax-dtype154",
    "int8_row-absmax-dtype159",
    "llm_int8-absmax-dtype160",
    "int4_64-absmax-dtype165",
)
@every_dtype
def test_zeros_stay_zero(name, rule, dtype):
    x = torch.zeros(3, 256, dtype=dtype)
    x[0] = -0.0
    x[1, 5] = 1.0
    found = assert_like_oracle(name, rule, x)
    assert found.dequantize()[1, 5].item() == pytest.approx(1.0, rel=0.1)
    same_bits(found.dequantize().abs(), x.abs().where(x == 0, found.dequantize()[1, 5]))
    same_bits(get_quantizer(name, scale=rule)(torch.zeros(2, 64, dtype=dtype)), torch.zeros(2, 64, dtype=dtype))


@pytest.mark.quick("fp8_128x128-absmax", "dynamic8-absmax", "int8_tensor-absmax")
@every_rule
def test_subnormal_blocks(name, rule):
    x = torch.randint(-5, 6, (3, 256)) * 2.0**-149
    assert_like_oracle(name, rule, x)
    assert_like_oracle(name, rule, x * 2**20)


@pytest.mark.quick(
    "fp8_128x128-absmax", "nf4-absmax", "af4-absmax", "int8_tensor-absmax", "uint8_row-affine", "uint4_64-affine"
)
@every_rule
def test_huge_blocks(name, rule):
    x = torch.randn(3, 256).clamp(-1, 1) * torch.finfo(torch.float32).max
    x[1] /= 2
    x[2, 3] = torch.finfo(torch.float32).max
    assert assert_like_oracle(name, rule, x).dequantize().isfinite().all()


@pytest.mark.parametrize("name", ONE_TILE)
@for_each("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_or_infinity_makes_its_tile_nan_and_no_other(name, bad):
    columns = blocks.BLOCKS[name][1][1]
    x = torch.randn(4, 2 * columns)
    x[1, columns + 3] = bad
    x[2, 0] = bad
    result = get_quantizer(name)(x)
    lost = torch.zeros(x.shape, dtype=torch.bool)
    lost[1, columns:] = lost[2, :columns] = True
    assert result[lost].isnan().all()
    assert result[~lost].isfinite().all()
    clean = torch.where(lost, 0.0, x)
    same_bits(result[~lost], get_quantizer(name)(clean)[~lost])


@every_rule
@for_each("shape", [(0,), (0, 32), (3, 0)])
def test_empty_tensors(name, rule, shape):
    found = get_quantizer(name, scale=rule).quantize(torch.zeros(shape))
    assert found.dequantize().shape == shape


@pytest.mark.quick("mxint8-rceil", "fp8_1x128-absmax", "fp8_128x128-absmax", "nf4-absmax")
@every_rule
def test_strides_do_not_change_the_result(name, rule):
    x = torch.randn(40, 40)
    for view in (x.t(), x[::2, 1::3], x[:1].expand(4, 40)):
        same_bits(get_quantizer(name, scale=rule)(view), get_quantizer(name, scale=rule)(view.contiguous()))


@pytest.mark.parametrize(("name", "rule"), [r for r in RULES if r[1] in blocks.POWERS_OF_TWO])
def test_power_of_two_scaled_values_are_unchanged_by_quantizing_again(name, rule):
    """Under its own scale a tile's values are in the format already; a smaller amax may choose a smaller scale."""
    x = torch.randn(16, 256)
    once = get_quantizer(name, scale=rule).quantize(x)
    again = get_quantizer(name, scale=rule).quantize(once.dequantize())
    kept = (once.scale == again.scale).repeat_interleave(256 // once.scale.shape[1], 1)
    kept = kept if kept.shape[0] == 16 else kept.expand(16, -1)
    same_bits(again.dequantize()[kept], once.dequantize()[kept])
    assert kept.double().mean() > 0.5


@pytest.mark.parametrize(
    ("name", "rule", "block", "byte", "decoded"),
    [
        ("mxfp4", "floor", [7.0, 0.1], 127, [6.0, 0.0]),
        ("mxfp4", "floor", [4.0, 0.26], 127, [4.0, 0.5]),
        ("mxfp4", "floor", [7.99, 0.1], 127, [6.0, 0.0]),
        ("mxfp4", "ceil", [7.0, 0.1], 128, [8.0, 0.0]),
        ("mxfp4", "rceil", [7.0, 0.1], 128, [8.0, 0.0]),
        ("mxfp4", "rceil", [6.0, 0.1], 127, [6.0, 0.0]),
        ("mxfp4", "even", [7.0, 0.1], 128, [8.0, 0.0]),
        ("mxfp4", "even", [6.9, 0.1], 127, [6.0, 0.0]),
        ("mxfp8_e4m3", "floor", [1.9, 0.0], 119, [1.75, 0.0]),
        ("mxfp8_e4m3", "rceil", [1.9, 0.0], 120, [1.875, 0.0]),
        ("mxfp8_e4m3", "floor", [511.0, 1.0], 127, [448.0, 1.0]),
        ("mxint8", "floor", [1.0, -0.5], 127, [1.0, -0.5]),
        ("mxint8", "floor", [-1.999, 1 / 128], 127, [-127 / 64, 0.0]),
    ],
)
def test_scales_and_values_worked_by_hand(name, rule, block, byte, decoded):
    x = torch.tensor([[block[0]] + [block[1]] * 31])
    found = get_quantizer(name, scale=rule).quantize(x)
    assert found.scale.tolist() == [[byte]]
    same_bits(found.dequantize(), torch.tensor([[decoded[0]] + [decoded[1]] * 31]))


def test_ties_of_nvfp4_go_to_the_even_code():
    """Ties of e2m1 go to the even code: 0.25 to 0, 0.75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to 2, 3.5 to 4, 5 to 4."""
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2]) * 448
    found = get_quantizer("nvfp4").quantize(x)
    assert found.tensors["tensor_scale"].item() == 1
    assert found.scale.tolist() == [[0x7E]]
    assert (found.dequantize() / 448)[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


@for_each("power", [-149, -140, -130, -124, -120, -110, 0, 100])
def test_two_level_up_clips_nothing(power):
    """Amaxes of every magnitude, in tensors of every magnitude: subnormal values, and amaxes just above an E4M3
    scale."""
    generator = torch.Generator().manual_seed(power + 149)
    x = torch.randn(400, 16, generator=generator, dtype=torch.float64) * 2.0 ** (power + 8)
    x *= torch.randint(-12, 12, (400, 1), generator=generator).double().exp2()
    x[:50] = (
        torch.nextafter((positive_e4m3_values()[:50, None] * 6).float(), torch.tensor(torch.inf)).double() * 2.0**power
    )
    x = x.float()
    clipped = {}
    for rule in ("two_level", "two_level_up"):
        found = get_quantizer("nvfp4", scale=rule).quantize(x)
        multiplier = found.quantizer.scales.rule.multiplier(found.tensors, found.quantizer.format)
        clipped[rule] = bool((x.abs() / multiplier > 6).any())
    assert not clipped["two_level_up"]
    assert clipped["two_level"] or power == -149


def positive_e4m3_values():
    """The positive values of E4M3 from the largest down."""
    return torch.tensor([formats.get("e4m3fn").decode(code) for code in range(0x7E, 0, -1)], dtype=torch.float64)


def test_four_over_six_scales_to_six_where_the_errors_are_equal():
    """256 * 6 and 384 * 4 are both exactly the block's maximum."""
    found = get_quantizer("nvfp4", scale="four_over_six").quantize(torch.eye(1, 16) * 1536)
    assert found.tensors["tensor_scale"].item() == 1
    assert formats.get("e4m3fn").decode(found.scale.item()) == 256


def test_four_over_six_compares_errors_exactly():
    """Blocks of 16 and of 256 elements that tie but for small ones, whose float64 sums round, in any order."""
    x, shuffled = tied((48, 64)), torch.randperm(16, generator=torch.Generator().manual_seed(0))
    other = x.view(48, 4, 16)[:, :, shuffled].reshape(48, 64)
    for each in (x, other, x.flip(0).contiguous()):
        assert_like_oracle("nvfp4", "four_over_six", each)
    for tile, times in ((Tile(1, 16), 16), (Tile(16, 16), 1)):
        quantizer = Quantizer(formats.get("e2m1fn"), scales=Scales(tile, get_scaling("four_over_six")))
        for each in (x, other):
            multiplier = e4m3_values(quantizer.quantize(each).scale)
            assert multiplier.tolist() == [[top] * 4 for top in (256, 256, 384) for _ in range(times)]


def e4m3_values(codes):
    """The values of E4M3 codes."""
    return codes.view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize(
    ("element", "codes", "packed"),
    [
        ("mxfp4", [1.0, 2.0, 4.0], [0x42, 0x06]),
        ("nf4", [-1.0, 1.0, 0.0], [0x0F, 0x70]),
        ("mxfp6_e2m3", [0.125, 0.25, 0.375, 7.5], [0x81, 0x30, 0x7C]),
        ("mxfp6_e2m3", [0.125, 7.5], [0xC1, 0x07]),
    ],
)
def test_codes_are_packed_into_bytes(element, codes, packed):
    assert get_quantizer(element).quantize(torch.tensor(codes)).codes.tolist() == [packed]


@every_block
def test_every_block_format_has_an_oracle_and_its_properties(name):
    f = formats.get_block(name)
    element, tile, rule = blocks.BLOCKS[name]
    assert (f.element.name, f.tile, f.rules[0]) == (element, tile, rule)
    assert set(f.rules) == {r for n, r in RULES if n == name}
    assert set(formats.block_names()) == set(blocks.BLOCKS)


@pytest.mark.quick("ceil", "below")
@pytest.mark.parametrize("rule", [*blocks.POWERS_OF_TWO, "below"])
@for_each("format", ["e4m3fn", "e5m2", "e2m1fn", "ocp_int8", "fp16"])
def test_scale_factors_of_one_amax_and_of_many_are_equal(rule, format):
    """A scalar amax is computed in Python, a tensor of amaxes in torch."""
    scaling, element = get_scaling(rule), formats.get(format)
    powers = torch.arange(-149, 128, dtype=torch.float64).exp2().float()
    around = (torch.full_like(powers, end) for end in (0.0, torch.inf))
    amaxes = [powers, *(powers.nextafter(to) for to in around), powers * 1.75, powers * 1.9375]
    many = torch.cat([*amaxes, torch.tensor([0.0, torch.inf, torch.nan])])
    each = torch.stack([scaling.factor(amax, element) for amax in many])
    same_bits(each, scaling.factor(many, element))


@pytest.mark.parametrize(
    ("name", "bits"), [("mxfp8_e4m3", 8.25), ("mxfp6_e3m2", 6.25), ("mxfp4", 4.25), ("mxint8", 8.25), ("nvfp4", 4.5)]
)
def test_bits_per_value_include_scales(name, bits):
    assert formats.get_block(name).bits == bits


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "nvfp4", "nf4"])
def test_stochastic_elements_are_neighbors_and_unbiased(name):
    x = torch.linspace(-1, 1, 64).repeat(4000, 1)
    scaled = get_quantizer(name, rounding="stochastic")
    result = scaled(x, 5).double()
    same_bits(scaled(x, 5).double(), result)
    gap = {"mxfp4": 0.5, "mxfp8_e4m3": 0.125, "nvfp4": 0.5, "nf4": 0.35}[name]
    assert (result - x).abs().max() <= gap
    if name != "mxfp4":
        torch.testing.assert_close(result.mean(0), x[0].double(), atol=4 * gap / 2 / 4000**0.5, rtol=0)
