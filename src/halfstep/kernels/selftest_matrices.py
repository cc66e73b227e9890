"""Kernels of matrices against the reference, bit for bit: rows with a scale each, clamps, and what is rotated first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep import formats, quant
from halfstep.kernels.cpu import (
    blocks,
    clamp_operators,
    folded,
    panels,
    quantiles,
    rotated_tiles,
    rows,
    slopes,
    sparse,
    whole_mm,
)
from halfstep.kernels.selftest import Case, Outcome, hard, outcome, words
from halfstep.quant import Clamp, Estimator, Hadamard, Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW


_DTYPES = (torch.float32, torch.bfloat16)
_NONE = torch.empty(0, dtype=torch.float32, device="cpu")
_SEED = 99


def outcomes() -> Iterator[Outcome]:
    """Test every kernel, a few formats each."""
    for kernel, names, test in _TESTS:
        for name in names:
            yield outcome(kernel, name, test)


def _matrix(dtype: torch.dtype, columns: int = 64) -> Tensor:
    """Numbers of all sizes whose products with small ones are finite."""
    x = hard(33 * columns, dtype).view(33, columns).nan_to_num(1.0)
    return torch.where(x.abs() < 1e30, x, 1.0)


def _powered_rows(name: str) -> Iterator[Case]:
    """Rows with a power of two each, of a matrix and of its transposed view."""
    scales = Scales(ROW, get_scaling("rceil"))
    quantizer = Quantizer(formats.get(name), scales=scales)
    for dtype in _DTYPES:
        x = hard(33 * 64, dtype).view(33, 64)
        for given, what in ((x, "rows"), (x.t().contiguous().t(), "a transposed view")):
            out = torch.empty(x.shape, dtype=dtype, device="cpu")
            view = not given.is_contiguous()
            small = panels.run_view(given, out, quantizer) if view else blocks.run_values(given, out, quantizer, None)
            if small is not None:
                yield quantizer.quantize(x).dequantize(), out, x, words(x, what)


def _rotated_tiles(name: str) -> Iterator[Case]:
    """Rotated down the columns and rounded, to nearest and stochastically."""
    rule, size, high = ("two_level", 16, 16) if name == "nvfp4" else ("rceil", 64, 32)
    for dtype, rounding in itertools.product(_DTYPES, ("nearest_even", "stochastic")):
        x, signs, seed = _matrix(dtype), Hadamard(size, 5).signs(), _SEED if rounding == "stochastic" else None
        quantizer = Quantizer(formats.get("e2m1fn"), rounding, scales=Scales(Tile(high, 1), get_scaling(rule)))
        wide = quant.rotate(x, signs, 0)
        numbers = rotated_tiles.numbers_of(x, signs, 0, quantizer, torch.float32)
        if numbers is None:
            continue
        if name == "nvfp4":
            scale = rotated_tiles.tensor_scale(x, signs, quantizer)
            assert scale is not None
            found = rotated_tiles.run_two_levels(x, signs, quantizer, numbers, seed, scale, torch.float32)
            made = quantizer.quantize(wide, seed)
            parts = made.tensors | {"tensor_scale": torch.ones((), dtype=torch.float32, device="cpu")}
            expected = quant.Quantized(quantizer, made.shape, torch.float32, parts).dequantize()
            yield made.tensors["tensor_scale"], scale, _NONE, words(x, rounding, "the tensor's scale")
        else:
            found = rotated_tiles.run_powers(x, signs, 0, quantizer, numbers, seed, 1.0, torch.float32)[0]
            expected = quantizer.down.quantize(wide.t().contiguous(), seed).dequantize().t()
        yield expected, found, _NONE, words(x, rounding)


def _quantiles(name: str) -> Iterator[Case]:
    """Quantiles of a tensor and of rows, and what is beyond them."""
    for dtype, tile in itertools.product(_DTYPES, ("tensor", "row")):
        x, clamp = _matrix(dtype, 300), Clamp(0.9, tile, name)
        bounds = torch.empty(2, x.shape[0] if tile == "row" else 1, dtype=torch.float32, device="cpu")
        if quantiles.run(x, bounds, clamp):
            yield clamp.bounds(x), bounds, _NONE, words(x, f"of a {tile}")
            given = clamp_operators.sparse(clamp.parts(x, bounds)[1].float())
            beyond = rows.run_beyond(x, bounds)
            assert beyond is not None
            for part, expected in zip(beyond, given, strict=True):
                assert expected is not None
                yield expected, part, _NONE, words(x, f"beyond those of a {tile}")


def _rows(name: str) -> Iterator[Case]:
    """Clamped, multiplied by a factor a row or a column, and rounded: in whole numbers, and to values."""
    format, bounds = formats.get(name), torch.tensor([[-1.25], [2.5]], dtype=torch.float32, device="cpu")
    for dtype, shape in itertools.product(_DTYPES, ((33, 1), (1, 64))):
        x, factor = _matrix(dtype), torch.linspace(0.5, 3.0, max(shape), dtype=torch.float32, device="cpu").view(shape)
        powers = torch.exp2(factor.round())
        for into, by, steps in ((torch.int8, factor, 2), (torch.bfloat16, powers, 1)):
            out = torch.empty(x.shape, dtype=into, device="cpu")
            if rows.run(x, out, bounds, by, format, "nearest_up", steps):
                rounded = quant.round_to(x.float().clamp(-1.25, 2.5) * by, format, "nearest_up")
                yield (rounded * 2 if steps == 2 else rounded / by).to(into), out, x, words(x, str(into))
    x = _matrix(torch.float32)
    for dim in (0, 1):
        found = rows.run_amax(x, None, dim)
        assert found is not None
        yield x.abs().amax(dim, keepdim=True), found, _NONE, words(x, f"maxima along {dim}")


def _folded(name: str) -> Iterator[Case]:
    """Times a factor a row or a column, and rounded as one tensor."""
    format, rule = formats.get(name), get_scaling("current")
    for dtype, shape in itertools.product(_DTYPES, ((33, 1), (1, 64))):
        x = _matrix(dtype)
        scale = torch.linspace(0.5, 3.0, max(shape), dtype=torch.float32, device="cpu").view(shape)
        found = folded.run(x, scale, format, "nearest_even", rule, torch.bfloat16)
        if found is not None:
            wide = x.float() * scale
            factor = rule.factor(wide.abs().max(), format)
            assert factor is not None
            yield factor.reciprocal(), found[1], _NONE, words(x, "the scale of the largest")
            yield quant.round_to(wide * factor, format).to(torch.bfloat16), found[0], x, words(x, "rounded")


def _sparse(name: str) -> Iterator[Case]:
    """A sparse matrix times a dense one: whole numbers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randint(-8, 9, (33, 65), generator=generator, dtype=torch.int64, device="cpu").float()
    matrix = matrix * (torch.rand(33, 65, generator=generator, dtype=torch.float32, device="cpu") < 0.2)
    parts = clamp_operators.sparse(matrix)
    for down in (False, True):
        other = torch.randint(-8, 9, (33 if down else 65, 50), generator=generator, dtype=torch.int64, device="cpu").to(
            getattr(torch, name)
        )
        out = torch.empty(65 if down else 33, 50, dtype=torch.float32, device="cpu")
        if sparse.run(parts[0], parts[1], parts[2], 65, down, other, None, out):  # type: ignore[arg-type]
            yield (matrix.t() if down else matrix) @ other.float(), out, _NONE, "transposed" if down else "as it lies"


class Whole(NamedTuple):
    """An operand of `whole_mm`."""

    values: Tensor
    scale: Tensor | None


def _whole_products(name: str) -> Iterator[Case]:
    """Whole numbers times scales that are powers of two, so that all but the last rounding is exact."""
    generator, dtype = torch.Generator().manual_seed(1), getattr(torch, name)
    lhs, rhs = (
        torch.randint(-12, 13, shape, generator=generator, dtype=torch.int64, device="cpu")
        for shape in ((33, 64), (64, 40))
    )
    first, second = (
        torch.exp2(torch.arange(33.0, dtype=torch.float32, device="cpu") % 5 - 2)[:, None],
        torch.exp2(torch.arange(40.0, dtype=torch.float32, device="cpu") % 7 - 3)[None],
    )
    a, b = Whole(lhs.to(torch.int8), first), Whole(rhs.to(torch.int8), second)
    exact = (lhs.double() @ rhs.double()) * first * second
    for bias, more in itertools.product(
        (None, torch.ones(40, dtype=torch.float32, device="cpu")),
        (None, torch.ones(33, 40, dtype=torch.float32, device="cpu")),
    ):
        if (found := whole_mm.run(a, b, bias, dtype, None, more)) is not None:
            expected = exact + (0 if bias is None else 1) + (0 if more is None else 1)
            yield expected.to(dtype), found, _NONE, words(exact, name)


def _slopes(name: str) -> Iterator[Case]:
    """A gradient times an estimator's derivative."""
    for dtype, tile in itertools.product(_DTYPES, (ROW, ROW.transposed)):
        rule = get_scaling("rceil")
        quantizer = Quantizer(formats.get(name), scales=Scales(tile, rule), estimator=Estimator())
        x, grad = _matrix(dtype), torch.linspace(-2, 2, 33 * 64, dtype=torch.float32, device="cpu").view(33, 64)
        factor = rule.factor(tile.reduce(x.abs(), "amax").float(), quantizer.format)
        if factor is not None and slopes.scalars(quantizer.format) is not None:
            found = clamp_operators.estimate(grad.clone(), x, quantizer, factor)
            yield grad * quantizer.derivative(x), found, x, words(x, str(tile))


_TESTS: tuple[tuple[str, tuple[str, ...], Callable[[str], Iterator[Case]]], ...] = (
    ("powered rows", ("float8_e4m3fn", "float8_e5m2", "e2m1fn"), _powered_rows),
    ("rotated tiles", ("nvfp4", "mxfp4"), _rotated_tiles),
    ("quantiles", ("exact", "histogram"), _quantiles),
    ("rows", ("fp4", "float8_e4m3fn"), _rows),
    ("folded", ("float8_e5m2",), _folded),
    ("sparse products", ("float32", "bfloat16"), _sparse),
    ("whole products", ("float32", "bfloat16"), _whole_products),
    ("slopes", ("fp4",), _slopes),
)
