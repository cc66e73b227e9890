"""Values rounded to a grid under per-tile scales are recognised, whoever quantized them; other values are not."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from families import in_turn, slow_unless
from halfstep import formats
from halfstep.bits.grids import CERTAIN, ENOUGH, GRIDS, WHOLE, fit_levels, fit_tiles
from halfstep.bits.origin import origin
from halfstep.bits.scan import Levels, scan
from halfstep.bits.sentences import Evidence, verdict
from halfstep.bits.values import InMemory, Places
from halfstep.formats import Float


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NF4 = torch.tensor(  # QLoRA, appendix E
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
BNB = torch.tensor([0, 0.0052083333, 0.16666667, 0.25, 0.33333333, 0.5, 0.66666667, 1])  # csrc/kernels.cu
BNB = torch.cat([-BNB, BNB])


def binary(mantissa: int, exponents: int) -> Tensor:
    """The values of an OCP format with `exponents` exponents, the smallest being 1 - bias."""
    lowest = 2 - 2 ** (exponents.bit_length() - 1) if exponents > 2 else 0
    steps = torch.arange(2**mantissa) / 2**mantissa
    normal = [2.0 ** (lowest + e) * (1 + steps) for e in range(exponents)]
    values = torch.cat([2.0**lowest * steps, *normal])
    return torch.cat([-values, values])


E2M3, E3M2 = binary(3, 3), binary(2, 7)


def nearest(x: Tensor, values: Tensor) -> Tensor:
    return values[(x.unsqueeze(-1) - values).abs().argmin(-1)]


ROUND = {
    "float8_e4m3fn": (448, lambda x: x.to(torch.float8_e4m3fn).float()),
    "float8_e5m2": (57344, lambda x: x.to(torch.float8_e5m2).float()),
    "int8": (127, torch.round),
    "int4": (7, torch.round),
    "float4_e2m1fn": (6, lambda x: nearest(x, torch.cat([-E2M1, E2M1]))),
    "float6_e2m3fn": (7.5, lambda x: nearest(x, E2M3)),
    "float6_e3m2fn": (28, lambda x: nearest(x, E3M2)),
    "nf4": (1, lambda x: nearest(x, NF4)),
    "bnb_fp4": (1, lambda x: nearest(x, BNB)),
}
"""The largest value of each format, and a function that rounds to it in plain torch."""

TILES = {
    "128x128": (128, 128),
    "row": (1, 384),
    "1x128": (1, 128),
    "1x64": (1, 64),
    "1x32": (1, 32),
    "1x16": (1, 16),
}


def quantized(x: Tensor, name: str, rows: int, columns: int) -> Tensor:
    """Each block divided by its amax over the format's largest value, rounded, and multiplied again."""
    largest, rounded = ROUND[name]
    result = torch.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns]
            scale = block.abs().max() / largest
            result[i : i + rows, j : j + columns] = rounded(block / scale) * scale if scale else block
    return result


def weights(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 0.02 * (torch.rand(shape[0], 1, generator=generator) + 0.1)


def origin_of(tensor):
    values = InMemory(tensor.contiguous())
    return origin(scan(values), values.dtype)


@pytest.mark.quick("float8_e4m3fn-128x128", "float8_e5m2-row")
@pytest.mark.parametrize(
    ("name", "tile"), slow_unless(in_turn([*ROUND], [*TILES]).__contains__, itertools.product(ROUND, TILES))
)
def test_formats_and_scale_tiles_are_recognised(name, tile):
    found = origin_of(quantized(weights(256, 384), name, *TILES[tile]).bfloat16())
    assert (found.key, found.confidence) == (f"scaled {name} {tile}", "certain")


WIDER = ["float8_e4m3fn", "int8", "nf4"], ["128x128", "row", "1x32"], [torch.float16, torch.float32]


@pytest.mark.quick("float8_e4m3fn-128x128-dtype0")
@pytest.mark.parametrize(
    ("name", "tile", "dtype"), slow_unless(in_turn(*WIDER).__contains__, itertools.product(*WIDER))
)
def test_formats_and_scale_tiles_are_recognised_in_wider_dtypes(name, tile, dtype):
    values = quantized(weights(256, 384), name, *TILES[tile])
    assert origin_of(values.to(dtype)).key == f"scaled {name} {tile}"
    assert origin_of(values.bfloat16().to(torch.float32)).key == f"scaled {name} {tile}"


@pytest.mark.quick("shape0", "shape2")
@pytest.mark.parametrize("shape", [(300, 200), (576, 7168), (129, 257), (200, 16384)])
def test_fp8_blocks_of_ragged_and_wide_matrices_are_recognised(shape):
    found = origin_of(quantized(weights(*shape), "float8_e4m3fn", 128, 128).bfloat16())
    assert found.key == "scaled float8_e4m3fn 128x128"


def test_stacked_experts_and_bf16_scales_are_recognised():
    experts = torch.stack([quantized(weights(256, 256, seed=i), "float8_e4m3fn", 128, 128) for i in range(3)])
    assert origin_of(experts.bfloat16()).key == "scaled float8_e4m3fn 128x128"
    codes = weights(64, 512).mul(1e4).to(torch.float8_e4m3fn).bfloat16()
    assert origin_of(codes * torch.rand(64, 1).bfloat16()).key == "scaled float8_e4m3fn row"


def test_two_level_scales_and_zero_points_are_recognised():
    x = weights(64, 512)
    blocks = x.view(-1, 16)
    scales = (blocks.abs().amax(1, keepdim=True) / 6 / 1e-5).to(torch.float8_e4m3fn).float() * 1e-5
    nvfp4 = nearest((blocks / scales).clamp(-6, 6), torch.cat([-E2M1, E2M1])) * scales
    assert origin_of(nvfp4.view_as(x).bfloat16()).key == "scaled float4_e2m1fn 1x16"
    low, high = x.view(-1, 128).aminmax(dim=1, keepdim=True)
    step = (high - low) / 15
    zero = (-low / step).round()
    awq = ((x.view(-1, 128) / step + zero).round().clamp(0, 15) - zero) * step
    assert origin_of(awq.view_as(x).half()).key == "scaled int4 1x128"


def test_zero_blocks_and_nonfinite_values_are_ignored():
    values = quantized(weights(256, 384), "float8_e4m3fn", 128, 128)
    values[:5], values[:, :128], values[9, 200], values[10, 300] = 0, 0, torch.inf, torch.nan
    assert origin_of(values.bfloat16()).key == "scaled float8_e4m3fn 128x128"


@pytest.mark.parametrize("place", [(0, 3), (0, 300)])
def test_one_value_off_the_grid_refutes_the_format(place):
    values = quantized(weights(256, 384), "float8_e4m3fn", 128, 128).bfloat16()
    block = values[:128, place[1] // 128 * 128 :][:, :128]
    values[place] = block.abs().max() * 0.74  # 331.5 of 448, between 320 and 352
    assert origin_of(values).key == "levels 128x128"


def test_verdict_text_names_format_and_tiles():
    values = quantized(weights(256, 384), "int8", 1, 384).bfloat16()
    assert verdict([Evidence("bfloat16", values.numel(), origin_of(values))]).text == (
        "stored bfloat16, every value looked at exactly int8 times a scale for each row: "
        "quantised to int8 by rows before it was stored"
    )


def places(x: Tensor) -> Places:
    bits = x.float().numpy().view(np.uint32)
    return Places(bits[:8].copy(), (bits[:128, :512].copy(),))


SHAPES = ((1, 16), (1, 500), (4, 4), (3, 17), (8, 32), (16, 16), (40, 40), (128, 128), (7, 300), (200, 700), (64, 2))
KINDS = {
    "normal": lambda x, u: x,
    "uniform": lambda x, u: u,
    "heavy tails": lambda x, u: x**5,
    "3 values": lambda x, u: x.flatten()[(u * min(3, x.numel())).long()],
    "8 values": lambda x, u: x.flatten()[(u * min(8, x.numel())).long()],
    "rows alike": lambda x, u: x[:1].expand_as(x),
    "sparse": lambda x, u: x * (u < 0.05),
    "one-hot": lambda x, u: (u < 0.05).float() * x[0, 0],
    "ternary": lambda x, u: x.abs().mean() * ((u * 3).long() - 1),
    "constant": lambda x, u: torch.full_like(x, float(x[0, 0])),
    "zeros": lambda x, u: torch.zeros_like(x),
    "rank 1": lambda x, u: x[:, :1] * x[:1],
    "rows scaled": lambda x, u: x * u[:, :1],
}


@pytest.mark.quick("normal-one", "sparse-one", "rows scaled-one")
@pytest.mark.parametrize("seeds", [[0], pytest.param([1, 2, 3], marks=pytest.mark.slow)], ids=["one", "more"])
@pytest.mark.parametrize("kind", KINDS)
def test_unquantized_values_fit_no_tiles(kind, seeds):
    bf16, fp16, fp32 = (formats.get(name, Float) for name in ("bf16", "fp16", "fp32"))
    for seed in seeds:
        for shape in SHAPES:
            generator = torch.Generator().manual_seed(seed)
            x, u = (make(shape, generator=generator) for make in (torch.randn, torch.rand))
            values = KINDS[kind](x * 10 ** (6 * u[0, 0] - 4), u)
            assert fit_tiles(places(values.bfloat16()), bf16) is None
            assert fit_tiles(places(values.half()), fp16) is None
            assert fit_tiles(places(values), fp32) is None


def test_repeated_values_count_once():
    bf16 = formats.get("bf16", Float)
    once = quantized(weights(1, 512), "float4_e2m1fn", 1, 16).bfloat16()
    single, many = (fit_tiles(places(once.repeat(n, 1)), bf16) for n in (1, 2))
    assert single.fit.bits == many.fit.bits > CERTAIN
    few = once[:, :16].repeat(8, 32)  # one block, again and again
    assert fit_tiles(places(few), bf16) is None


@pytest.mark.slow
@pytest.mark.parametrize("levels", [4, 6])
def test_random_mantissas_rarely_give_evidence(levels):
    """At most 2^-10 of random mantissas reach 10 bits of evidence, over all formats and scales."""
    bf16, rng, trials = formats.get("bf16", Float), np.random.default_rng(levels), 4000
    bits = np.sort(rng.integers(0x3F00, 0x4080, (trials, levels)).astype(np.uint32) << 16, axis=1)
    values = bits.view(np.float32).astype(np.float64)
    found = sum(
        fit_levels(Levels(np.unique(row), np.full(np.unique(row).size, 100)), bf16) is not None for row in values
    )
    assert found <= 3 * trials * 2**-ENOUGH


def test_rows_after_the_first_tile_are_sampled():
    values = weights(512, 384)
    values[:128] = quantized(values[:128].clone(), "int8", 1, 384)
    found = origin_of(values)
    assert (found.key, found.confidence) == ("partly scaled int8 row", "certain")
    assert found.share == pytest.approx(0.25, abs=0.02)
    assert "of rows looked at exactly int8" in verdict([Evidence("float32", values.numel(), found)]).text
    values[:128] = weights(128, 384)
    assert origin_of(values).key == "full"


def test_power_of_two_scales_distinguish_fp6_from_fp8():
    for name in ("float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2"):
        blocks = weights(256, 384).view(-1, 32)
        scale = torch.exp2(torch.log2(blocks.abs().amax(1, keepdim=True) / ROUND[name][0]).ceil())
        assert origin_of((ROUND[name][1](blocks / scale) * scale).view(256, 384)).key == f"scaled {name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_on_unknown_grids_are_few_levels(dtype):
    x = weights(256, 384)
    columns = quantized(x.t().contiguous(), "int8", 1, 256).t().contiguous()
    assert origin_of(columns.to(dtype)).key == "levels column"
    low, high = x.view(-1, 64).aminmax(dim=1, keepdim=True)
    hqq = ((x.view(-1, 64) - low) / (high - low) * 15).round() / 15 * (high - low) + low
    assert origin_of(hqq.view_as(x).float()).key == "levels 1x64"
    low, high = x.aminmax(dim=1, keepdim=True)
    step = (high - low) / 255
    asymmetric = ((x - low) / step).round() * step + low
    assert origin_of(asymmetric).key == "levels row"
    assert "no more than" in verdict([Evidence("float32", 1, origin_of(asymmetric))]).text


def test_every_format_is_tested():
    assert {*ROUND} - {"int8", "int4"} | {WHOLE} == {*GRIDS}
