"""Tests of kernels for matrices: scales per row, clamps, errors of casts, and matmuls, on a GPU's tensor cores too."""

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from halfstep import formats, quant
from halfstep.kernels import carried, scaled_mm
from halfstep.kernels.cpu import (
    accumulate,
    clamp_operators,
    few_rows,
    quantiles,
    rows,
    slopes,
    whole_mm,
)
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.cast_errors import CastErrors, Rows
from halfstep.kernels.selftest.case import (
    BFLOAT16,
    DTYPES,
    FLOAT32,
    FP8,
    Case,
    Cases,
    KernelTest,
    bounded,
    kernel_tests,
    named,
    scalar,
    whole,
    written,
)
from halfstep.kernels.units_mm import dtype_of, is_tiled
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.cast import pack
from halfstep.quant.scaling import delayed, get_scaling


_SHAPE = (33, 64)


def _quantiles(algorithm: str, device: torch.device, dtype: torch.dtype, tile: str) -> Cases:
    """Quantiles of a tensor and of rows, and the elements outside of them."""
    x, clamp = bounded((33, 300), dtype), quant.Clamp(0.9, tile, algorithm)
    bounds = torch.empty(2, 33 if tile == "row" else 1, dtype=torch.float32, device="cpu")
    yield Case(clamp.bounds(x), quantiles.run(x, bounds, clamp) and bounds)
    beyond: Any = clamp_operators.sparse(clamp.parts(x, bounds)[1].float()), rows.run_beyond(x, bounds)
    yield from (Case(expected, found, "what is beyond") for expected, found in zip(*beyond, strict=True))


def _rows(
    format: formats.Format, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], into: torch.dtype
) -> Cases:
    """Clamped, multiplied by a factor per row or column, and rounded: to int8, and to values."""
    x, bounds = bounded(_SHAPE, dtype), torch.tensor([[-1.25], [2.5]], dtype=torch.float32, device="cpu")
    factor, steps = (_factors(shape), 2) if into == torch.int8 else (torch.exp2(_factors(shape).round()), 1)
    out = torch.empty(_SHAPE, dtype=into, device="cpu")
    rounded = quant.round_to(x.float().clamp(-1.25, 2.5) * factor, format, "nearest_up")
    expected = (rounded * 2 if steps == 2 else rounded / factor).to(into)
    yield Case(expected, written(rows.run, x, out, bounds, factor, format, "nearest_up", steps), "", x)
    maxima = rows.run_amax(x, None, shape.index(1))
    yield Case(x.abs().amax(shape.index(1), keepdim=True), maxima, "largest magnitudes")


def _folded(format: formats.Format, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Cases:
    """Multiplied by a factor per row or column, and rounded as one tensor."""
    x, scale, rule = bounded(_SHAPE, dtype), _factors(shape), delayed.current
    wide, made = x.float() * scale, rows.run_folded(x, scale, format, "nearest_even", rule, torch.bfloat16)
    factor = delayed.factor_of(wide.abs().max(), format)
    yield Case(factor.reciprocal(), made and made[1], "the scale of the largest")
    yield Case(quant.round_to(wide * factor, format).bfloat16(), made and made[0], "rounded", x)


def _factors(shape: tuple[int, int]) -> torch.Tensor:
    return torch.linspace(0.5, 3.0, max(shape), dtype=torch.float32, device="cpu").view(shape)


def _slopes(format: formats.Format, device: torch.device, dtype: torch.dtype, tile: Tile) -> Cases:
    """A gradient times an estimator's derivative."""
    x, rule = bounded(_SHAPE, dtype), get_scaling("rceil")
    grad = torch.linspace(-2, 2, x.numel(), dtype=torch.float32, device="cpu").view_as(x)
    quantizer = Quantizer(format, scales=Scales(tile, rule), estimator=quant.Estimator())
    factor = rule.factor(tile.reduce(x.abs(), "amax").float(), format)
    found = slopes.scalars(format) is not None and clamp_operators.estimate(grad.clone(), x, quantizer, factor)
    yield Case(grad * quantizer.derivative(x), found, "", x)


def _cast_errors(quantizer: Quantizer, device: torch.device, dtype: torch.dtype) -> Cases:
    """How many values a cast makes zero, and infinite, counted by the kernel that does not write the values."""
    x = bounded((64, 128), dtype)
    cast_errors = CastErrors(quantizer, float(x.abs().max()))
    cast_errors.add(Rows(array(x), 128))
    found, y = cast_errors.errors(0.0, int((x != 0).sum())), quantizer(x.float())
    counted = torch.tensor([found.zeroed, found.infinite], dtype=torch.int64, device="cpu")
    yield Case(torch.stack([((y == 0) & (x != 0)).sum(), (~y.isfinite()).sum()]), counted, "zeros and infinities")


class Operand(NamedTuple):
    """An operand of a matmul."""

    values: torch.Tensor
    scale: torch.Tensor | None


def _carried(format: formats.Format, device: torch.device, rows: int, shared: int, columns: int, scaled: str) -> Cases:
    """Operands of few bits, so that every sum is exact in float32: any path must give the exact result, rounded."""
    lhs, rhs = (quant.round_to(x, format).bfloat16() for x in (whole(1, rows, shared), whole(2, columns, shared)))
    exact, scale = lhs.double() @ rhs.double().t(), scalar(0.37)
    expected = (exact.float() * scale if scaled else exact).bfloat16()
    yield Case(expected, carried.run(lhs, rhs.t(), None, scale if scaled else None))


def _few_rows(quantizer: Quantizer, device: torch.device, rows: int, shared: int, columns: int) -> Cases:
    """The weight read from codes and from values; one row, and several."""
    x, made = whole(1, rows, shared), quantizer.quantize(whole(2, columns, shared))
    values, found = made.dequantize(torch.float32), torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    exact = (x.double() @ values.double().t()).float()
    given = few_rows.weight_arguments(made.codes, made.tensors.get("scale"), quantizer)
    few_rows.run(array(x, torch.float32), given, 0.5, None, found)
    yield Case(exact * 0.5, found, "codes")
    few_rows.run_values(x, values.bfloat16(), None, x.new_ones(columns), found)
    yield Case(exact + 1, found, "values")


def _accumulate(accumulator: quant.Accumulator, device: torch.device, rows: int, shared: int, columns: int) -> Cases:
    """Emulated accumulators: rounding or aligned, with and without promotion."""
    sizes, out = ((rows, shared), (shared, columns)), torch.zeros(rows, columns, dtype=torch.float32, device="cpu")
    lhs, rhs = (bounded(size, torch.float32, limit=1e8).bfloat16().float() for size in sizes)
    yield Case(quant.accumulator.accumulate(lhs, rhs, accumulator), accumulate.run(lhs, rhs, out, accumulator) and out)


def _sparse(dtype: torch.dtype, device: torch.device, down: str) -> Cases:
    """A sparse matrix @ a dense one."""
    matrix = whole(1, 33, 65) * (whole(2, 33, 65, most=2) == 0)
    other = whole(3, 33 if down else 65, 50).to(dtype)
    out = torch.empty(65 if down else 33, 50, dtype=torch.float32, device="cpu")
    values, columns, starts = clamp_operators.sparse(matrix)
    done = rows.run_sparse(values, columns, starts, 65, bool(down), other, None, out)  # type: ignore[arg-type]
    yield Case((matrix.t() if down else matrix) @ other.float(), done and out)


def _whole_products(dtype: torch.dtype, device: torch.device, bias: str, more: str) -> Cases:
    """Integer matmuls with power-of-two scales, so that all roundings but the last are exact."""
    lhs, rhs = whole(1, 33, 64, most=12), whole(2, 64, 40, most=12)
    first = torch.exp2(torch.arange(33, dtype=torch.float32, device="cpu") % 5 - 2)[:, None]
    second = torch.exp2(torch.arange(40, dtype=torch.float32, device="cpu") % 7 - 3)[None]
    ones = torch.ones(33, 40, dtype=torch.float32, device="cpu")
    a, b = Operand(lhs.to(torch.int8), first), Operand(rhs.to(torch.int8), second)
    found = whole_mm.run(a, b, ones[0] if bias else None, dtype, None, ones if more else None)
    yield Case(((lhs.double() @ rhs.double()) * first * second + bool(bias) + bool(more)).to(dtype), found)


def _tensor_core_cases(sides: Any, device: torch.device, rows: int, shared: int, columns: int) -> Cases:
    """The matmul of integers on FP8 and FP4 tensor cores, each tile times a scale of its own, so that any order of
    summation gives the exact result: a difference means a wrong layout or scale."""
    lhs, rhs = _scaled(sides[0], rows, shared, 1), _scaled(sides[1], columns, shared, 3)
    exact = lhs.dequantize(torch.float64) @ rhs.dequantize(torch.float64).t()
    a, b = (replace(one, tensors={key: part.to(device) for key, part in one.tensors.items()}) for one in (lhs, rhs))
    if is_tiled(sides[0]):
        found = scaled_mm.run_tiled(a, b, None, torch.bfloat16)
    else:
        left, right = (one.codes.view(dtype_of(one.quantizer.format)) for one in (a, b))  # type: ignore[arg-type]
        scale = a.scale if sides[0].scales.tile.rows else a.scale[0, 0]
        found = scaled_mm.run(Operand(left, scale), Operand(right.t(), b.scale[0, 0]), None, torch.bfloat16)
    assert found is not None
    yield Case(exact.float().bfloat16(), found)


def _scaled(quantizer: Any, rows: int, columns: int, seed: int) -> quant.Quantized:
    """Integers of at most 4, times 1, 2 or 4 for each tile; times 3/8 where scales are float32, half where the tensor
    has a scale of its own."""
    (tile, rule), format = (quantizer.scales.tile, quantizer.scales.rule), quantizer.format
    codes = quant.encode(whole(seed, rows, columns, most=4), format)
    powers = torch.exp2(whole(seed + 1, *tile.grid(rows, columns), most=1) + 1)
    scale = 0.375 * powers if rule.holds == "float32" else quant.encode(powers, formats.get(rule.holds))
    tensors = {"codes": pack(codes, format.bits, format.high_nibble_first), "scale": scale}
    tensors |= {"tensor_scale": scalar(0.5)} if rule.two_level else {}
    return quant.Quantized(quantizer, (rows, columns), torch.float32, tensors)


def tensor_core_tests(device: torch.device) -> list[KernelTest]:
    """A test for every scaling that the tensor cores of that GPU take, at sizes that they take."""
    sizes = ((1, 16, 16), (33, 64, 48), (4, 128, 128), (36, 384, 256), (128, 256, 48), (256, 384, 128))
    return kernel_tests(
        "units",
        {
            name: sides
            for name, sides in TENSOR_CORE_OPERANDS.items()
            if scaled_mm.product_refusal(*sides, device) is None
        },
        _tensor_core_cases,
        lambda sides: [size for size in sizes if scaled_mm.misfit(sides[0], sides[1], size) is None],
    )


_RIGHT = Quantizer(formats.get("float8_e4m3fn"), scales=Scales(Tile(0, 0), delayed.current))
TENSOR_CORE_OPERANDS = {
    f"{name} {tile}": (Quantizer(format, scales=Scales(tile, delayed.current)), _RIGHT)
    for name, format in FP8.items()
    for tile in (Tile(0, 0), Tile(1, 0))
} | {
    "1x128 x 128x128": (get_quantizer("fp8_1x128"), get_quantizer("fp8_128x128")),
    "1x128 x 1x128": (get_quantizer("fp8_1x128"), get_quantizer("fp8_1x128")),
    "128x128 x 1x128": (get_quantizer("fp8_128x128"), get_quantizer("fp8_1x128")),
    "mxfp8_e4m3": (get_quantizer("mxfp8_e4m3"), get_quantizer("mxfp8_e4m3")),
    "nvfp4": (get_quantizer("nvfp4"), get_quantizer("nvfp4")),
}  # fmt: skip
"""Pairs of quantizers, for the left and the right operand, by kind of tile."""
_SIDES = DTYPES[:2], ((33, 1), (1, 64))
"""Dtypes, and the shapes of a factor per row and per column."""
CPU = (
    *kernel_tests(
        "cast errors", named(get_quantizer, "mxfp8_e4m3", "mxfp4", "nvfp4", "nf4", "int8_row", "fp8_128x128"),
        _cast_errors, product(DTYPES[:2]),
    ),
    *kernel_tests(
        "few rows", named(get_quantizer, "mxfp8_e4m3", "mxfp4", "posit8_1"), _few_rows, ((1, 96, 70), (5, 320, 64)),
    ),
    *kernel_tests(
        "accumulate", named(quant.get_accumulator, "fp16", "bf16", "hopper", "hopper-fast"), _accumulate,
        ((1, 1, 1), (7, 33, 5), (33, 300, 150)),
    ),
    *kernel_tests(
        "carried", FP8 | named(formats.get, "e2m1fn"), _carried,
        [(*s, scaled) for s in ((1, 1, 1), (7, 33, 5), (33, 64, 17)) for scaled in ("", "scaled")],
    ),
    *kernel_tests("quantiles", named(str, "exact", "histogram"), _quantiles, product(DTYPES[:2], ("tensor", "row"))),
    *kernel_tests(
        "rows", named(formats.get, "fp4", "float8_e4m3fn"), _rows, product(*_SIDES, (torch.int8, torch.bfloat16)),
    ),
    *kernel_tests("folded", named(formats.get, "float8_e5m2"), _folded, product(*_SIDES)),
    *kernel_tests("sparse products", FLOAT32 | BFLOAT16, _sparse, product(("", "transposed"))),
    *kernel_tests("whole products", FLOAT32 | BFLOAT16, _whole_products, product(("", "bias"), ("", "more"))),
    *kernel_tests("slopes", named(formats.get, "fp4"), _slopes, product(DTYPES[:2], (Tile(1, 0), Tile(0, 1)))),
)  # fmt: skip
