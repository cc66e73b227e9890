"""Every CPU kernel against the reference, bit for bit, on random and hard inputs: `halfstep doctor`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep import formats, quant
from halfstep.formats import Float, Format, Posit
from halfstep.kernels import carried
from halfstep.kernels.cpu import (
    accumulate,
    amax,
    blocks,
    cast,
    codes,
    dequantize,
    few_rows,
    panels,
    posit,
    rotated,
    tiles,
)
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.cast_errors import CastErrors, Rows, knows
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.cast import CONTAINERS
from halfstep.quant.scaling import get_scaling


SIZES = (0, 1, 17, (1 << 14) + 3)
"""None, one, a part of a vector, and a chunk with a rest."""
_FORMATS = ("float8_e4m3fn", "float8_e5m2", "e4m3fnuz", "e2m1fn", "e3m2fn", "int8", "bf16", "fp16")
_POSITS = ("posit8_2", "posit16_1")
_BLOCKS = ("dynamic8", "mxfp8_e4m3", "mxfp4", "mxfp6_e3m2", "nvfp4", "nf4", "fp8_1x128")
_SEED = 99


@dataclass(frozen=True)
class Outcome:
    """One kernel on one format: how many results were compared, and where the first one differs."""

    kernel: str
    format: str
    compared: int
    difference: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every bit was the reference's."""
        return self.difference is None


Case = tuple[Tensor, Tensor, Tensor, str]
"""What the reference gives, what the kernel gave, the input where it has the same shape (else empty), and words."""


def outcomes() -> Iterator[Outcome]:
    """Test every kernel, a few formats each."""
    for kernel, names, test in _TESTS:
        for name in names:
            yield outcome(kernel, name, test)


def outcome(kernel: str, name: str, test: Callable[[str], Iterator[Case]]) -> Outcome:
    """Compare every case of a test. A kernel that raises, or refuses all of them, is one that differs."""
    compared, difference = 0, None
    try:
        for expected, found, x, what in test(name):
            compared += expected.numel()
            difference = difference or compare(expected, found, x, what)
    except Exception as error:
        difference = f"raised {type(error).__name__}: {error}"
    return Outcome(kernel, name, compared, difference if compared or difference else "the kernel took no input")


def hard(size: int, dtype: torch.dtype = torch.float32, format: Format | None = None) -> Tensor:
    """Random bit patterns, ordinary numbers, specials and subnormals, and the format's values and boundaries with
    their neighbours: `size` of them, the hardest first."""
    generator = torch.Generator().manual_seed(size)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38, 1.0]
    parts = [torch.tensor(special, dtype=torch.float32, device="cpu")]
    if format is not None and format.bits <= 8:
        points = torch.tensor([*format.boundaries(), *format.values()], dtype=torch.float64, device="cpu").float()
        towards = (
            torch.tensor(math.inf, dtype=torch.float32, device="cpu"),
            torch.tensor(-math.inf, dtype=torch.float32, device="cpu"),
        )
        parts += [points, *(torch.nextafter(points, to) for to in towards)]
    patterns = torch.randint(-(2**31), 2**31, (size // 2,), generator=generator, dtype=torch.int64, device="cpu").to(
        torch.int32
    )
    parts += [patterns.view(torch.float32), torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")]
    return torch.cat(parts)[:size].to(dtype)


def compare(expected: Tensor, found: Tensor, x: Tensor, what: str) -> str | None:
    """Where two results differ first (NaN is NaN, and -0 is not 0), or None."""
    if expected.is_floating_point():
        wide, other = expected.double(), found.double()
        same = ((wide == other) & (wide.signbit() == other.signbit())) | (wide.isnan() & other.isnan())
    else:
        wide, other = expected.long(), found.long()
        same = wide == other
    if bool(same.all()):
        return None
    index = int((~same).flatten().nonzero()[0])
    given = f" of {x.flatten()[index].item()!r}" if x.numel() == expected.numel() else ""
    values = f"{other.flatten()[index].item()!r} found, {wide.flatten()[index].item()!r} expected"
    return f"{what}: element {index}{given}: {values}; {int((~same).sum())} of {same.numel()} differ"


def words(x: Tensor, *more: str) -> str:
    """What a tensor is, in a line."""
    return ", ".join([str(x.dtype).removeprefix("torch."), *more, f"{x.numel()} elements"])


def _cast(name: str) -> Iterator[Case]:
    format = formats.get(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in SIZES:
            x = hard(size, dtype, format)
            for rounding in ("nearest_even", "toward_zero", "stochastic"):
                out, seed = torch.empty_like(x), _SEED if rounding == "stochastic" else None
                if cast.run(x, out, format, rounding, "saturate", seed):
                    yield quant.round_to(x, format, rounding, "saturate", seed), out, x, words(x, rounding)


def _scaled(name: str) -> Iterator[Case]:
    format = formats.get(name)
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            x, out, factor = (
                hard(size, dtype, format),
                torch.empty(size, dtype=dtype, device="cpu"),
                torch.tensor(3.7, dtype=torch.float32, device="cpu"),
            )
            if cast.run(x, out, format, "nearest_even", "saturate", None, factor):
                expected = quant.round_to(x.float() * factor, format, "nearest_even", "saturate", None, out.clone())
                yield expected, out, x, words(x, "times a factor")


def _amax(name: str) -> Iterator[Case]:
    for size in SIZES:
        x = hard(size, getattr(torch, name)).nan_to_num(1.0)
        if (found := amax.run(x)) is not None:
            yield x.float().abs().max(), found, torch.empty(0, dtype=torch.float32, device="cpu"), words(x)


def _tiles(name: str) -> Iterator[Case]:
    for tile in (Tile(1, 0), Tile(0, 0), Tile(16, 16)):
        quantizer = Quantizer(formats.get(name), scales=Scales(tile, get_scaling("rceil")))
        for dtype in (torch.float32, torch.bfloat16):
            x = hard(32 * 48, dtype).view(32, 48).nan_to_num(1.0)
            out = torch.empty_like(x)
            if tiles.run(x, out, quantizer, None) is not None:
                yield quantizer.quantize(x).dequantize(), out, x, words(x, str(tile))


def _panels(name: str) -> Iterator[Case]:
    for tile, rounding in itertools.product((Tile(16, 1), Tile(16, 16)), ("nearest_even", "stochastic")):
        scales = Scales(tile, get_scaling(name))
        quantizer = Quantizer(formats.get("e2m1fn"), rounding, scales=scales)
        for dtype in (torch.float32, torch.bfloat16):
            x = hard(33 * 47, dtype).view(33, 47)
            seed, out = _SEED if rounding == "stochastic" else None, torch.empty_like(x)
            if panels.run_values(x, out, quantizer, seed) is not None:
                yield quantizer.quantize(x, seed).dequantize(), out, x, words(x, str(tile), rounding)


def _rotated(name: str) -> Iterator[Case]:
    """Each size of block, along a matrix's rows and down its columns."""
    for size, dim in itertools.product((2, 16, 64), (0, 1)):
        x, signs = hard(33 * 47, getattr(torch, name)).view(33, 47).nan_to_num(1.0), quant.Hadamard(size, 5).signs()
        x = torch.where(x.abs() < 1e30, x, 1.0)
        if (found := rotated.run(x, signs, dim)) is not None:
            nothing = torch.empty(0, dtype=torch.float32, device="cpu")
            yield quant.rotate(x, signs, dim), found, nothing, words(x, f"blocks of {size}")


def _posit(name: str) -> Iterator[Case]:
    format = formats.get(name, Posit)
    for size in SIZES:
        x = hard(size, torch.float32, format)
        out, stored = torch.empty_like(x), torch.empty(x.shape, dtype=CONTAINERS[format.storage_bits], device="cpu")
        if posit.run(x, out, format, "nearest_even"):
            yield quant.round_to(x, format), out, x, words(x, "values")
        if posit.run_encode(x, stored, format, "nearest_even"):
            yield quant.encode(x, format), stored, x, words(x, "codes")


def _codes(name: str) -> Iterator[Case]:
    format = formats.get(name)
    container = CONTAINERS[format.storage_bits]
    for size in SIZES:
        x = hard(size, torch.float32, format)
        x = x if format.has_nan else x[~x.isnan()]
        out = torch.empty(x.shape, dtype=container, device="cpu")
        if codes.run(x, out, format, "nearest_even", "saturate", None):
            yield quant.encode(x, format), out, x, words(x, "codes")
    stored = torch.arange(1 << format.bits, dtype=torch.int64, device="cpu").to(container)
    for dtype in (torch.float32, torch.bfloat16):
        back = torch.empty(stored.shape, dtype=dtype, device="cpu")
        if codes.run_decode(stored, back, format):
            yield quant.decode(stored, format, dtype), back, stored, words(stored, f"values in {dtype}")


def _blocks(name: str) -> Iterator[Case]:
    for quantizer in (get_quantizer(name), get_quantizer(name, rounding="stochastic")):
        columns = quantizer.scales.tile.columns if quantizer.scales else 1
        for rows, wide, dtype in ((1, 1, torch.float32), (9, 5, torch.float32), (9, 5, torch.bfloat16)):
            x = hard(rows * wide * columns, dtype).view(rows, wide * columns)
            yield from _quantised(x, quantizer, words(x, quantizer.rounding))


def _quantised(x: Tensor, quantizer: Quantizer, words: str) -> Iterator[Case]:
    seed = _SEED if quantizer.rounding == "stochastic" else None
    expected = quantizer.quantize(x, seed)
    tensors = {key: torch.zeros_like(tensor) for key, tensor in expected.tensors.items()}
    if not blocks.run(x, tensors, quantizer, seed):
        return
    for key, tensor in expected.tensors.items():
        yield tensor, tensors[key], torch.empty(0, dtype=torch.float32, device="cpu"), f"{words}, {key}"
    out, back = (
        torch.empty(x.shape, dtype=torch.float32, device="cpu"),
        torch.empty(x.shape, dtype=torch.float32, device="cpu"),
    )
    if blocks.run_values(x, out, quantizer, seed) is not None:
        yield expected.dequantize(torch.float32), out, x, f"{words}, values"
    if x.dim() == 2 and panels.run_view(x.t().contiguous().t(), back, quantizer) is not None:
        yield expected.dequantize(torch.float32), back, x, f"{words}, values down columns"
    if dequantize.run(expected.tensors, back, quantizer):
        yield expected.dequantize(torch.float32), back, x, f"{words}, dequantised"


def _cast_errors(name: str) -> Iterator[Case]:
    """How many values a cast makes zero, and infinite, by the kernel that writes none of them."""
    quantizer = get_quantizer(name)
    for dtype in (torch.float32, torch.bfloat16) if knows(quantizer, 128) else ():
        x = hard(64 * 128, dtype).view(64, 128)
        x = torch.where(x.abs() < 1e30, x, 1.0)
        cast_errors = CastErrors(quantizer, float(x.abs().max()))
        cast_errors.add(Rows(array(x), 128))
        found = cast_errors.errors(0.0, int((x != 0).sum()))
        y = quantizer(x.float())
        expected = torch.stack([((y == 0) & (x != 0)).sum(), (~y.isfinite()).sum()])
        yield (
            expected,
            torch.tensor([found.zeroed, found.infinite], dtype=torch.int64, device="cpu"),
            torch.empty(0, dtype=torch.float32, device="cpu"),
            words(x, "zeros and infinities"),
        )


def _carried(name: str) -> Iterator[Case]:
    """Operands of few bits, so that every sum is exact in float32: any path must give the exact product, rounded."""
    format = formats.get(name, Float)
    generator = torch.Generator().manual_seed(1)
    for rows, shared, across in ((1, 1, 1), (7, 33, 5), (33, 64, 17)):
        draw = torch.randint(
            -8, 9, (2, max(rows, across), shared), generator=generator, dtype=torch.int64, device="cpu"
        ).float()
        lhs, rhs = (quant.round_to(d, format).to(torch.bfloat16) for d in draw)
        lhs, rhs = lhs[:rows], rhs[:across].t()
        scale = torch.tensor(0.37, dtype=torch.float32, device="cpu")
        exact = lhs.double() @ rhs.double()
        yield (
            exact.to(torch.bfloat16),
            carried.run(lhs, rhs),
            torch.empty(0, dtype=torch.float32, device="cpu"),
            f"{rows}x{shared}x{across}",
        )
        scaled = (exact.float() * scale).to(torch.bfloat16)
        yield (
            scaled,
            carried.run(lhs, rhs, None, scale),
            torch.empty(0, dtype=torch.float32, device="cpu"),
            f"{rows}x{shared}x{across}, scaled",
        )


def _few_rows(name: str) -> Iterator[Case]:
    """Small whole numbers, so that every sum is exact, read from codes and from values; one row, and several."""
    quantizer = get_quantizer(name)
    generator = torch.Generator().manual_seed(1)
    for rows, across, shared in ((1, 70, 96), (5, 64, 320)):
        x = torch.randint(-8, 9, (rows, shared), generator=generator, dtype=torch.int64, device="cpu").float()
        made = quantizer.quantize(
            torch.randint(-8, 9, (across, shared), generator=generator, dtype=torch.int64, device="cpu").float()
        )
        values, words = made.dequantize(torch.float32), f"{rows}x{shared}x{across}"
        codes, scale = made.codes, made.tensors.get("scale")
        exact, found = (
            (x.double() @ values.double().t()).float(),
            torch.empty(rows, across, dtype=torch.float32, device="cpu"),
        )
        given = few_rows.given(codes, scale, quantizer) if few_rows.knows(quantizer, across, shared) else None
        if given is not None:
            few_rows.run(array(x, torch.float32), given, 0.5, None, found)
            yield exact * 0.5, found.clone(), torch.empty(0, dtype=torch.float32, device="cpu"), f"{words}, codes"
            few_rows.run_values(x, values.bfloat16(), None, x.new_ones(across), found)
            yield exact + 1, found, torch.empty(0, dtype=torch.float32, device="cpu"), f"{words}, values"


def _accumulate(name: str) -> Iterator[Case]:
    """Sums of products: rounded, or aligned and cut, promoted and not."""
    accumulator = quant.get_accumulator(name)
    for rows, shared, across in ((1, 1, 1), (7, 33, 5), (33, 300, 150)):
        lhs, rhs = hard(rows * shared).view(rows, shared), hard(shared * across).view(shared, across)
        lhs, rhs = (torch.where(side.abs() < 1e8, side, 1.0).to(torch.bfloat16).float() for side in (lhs, rhs))
        found = torch.zeros(rows, across, dtype=torch.float32, device="cpu")
        accumulate.run(lhs, rhs, found, accumulator)
        expected = quant.accumulator.accumulate(lhs, rhs, accumulator)
        yield expected, found, torch.empty(0, dtype=torch.float32, device="cpu"), f"{rows}x{shared}x{across}"


_TESTS: tuple[tuple[str, tuple[str, ...], Callable[[str], Iterator[Case]]], ...] = (
    ("cast", _FORMATS, _cast),
    ("scaled", _FORMATS[:4], _scaled),
    ("amax", ("float32", "bfloat16", "float16"), _amax),
    ("tiles", _FORMATS[:4], _tiles),
    ("panels", ("rceil", "two_level", "two_level_up"), _panels),
    ("rotated", ("float32", "bfloat16"), _rotated),
    ("posit", _POSITS, _posit),
    ("codes", (*_FORMATS, "nf4"), _codes),
    ("blocks", _BLOCKS, _blocks),
    ("cast errors", ("mxfp8_e4m3", "mxfp4", "nvfp4", "nf4", "int8_row", "fp8_128x128"), _cast_errors),
    ("few rows", ("mxfp8_e4m3", "mxfp4", "posit8_1"), _few_rows),
    ("accumulate", ("fp16", "bf16", "hopper", "hopper-fast"), _accumulate),
    ("carried", ("float8_e4m3fn", "float8_e5m2", "e2m1fn"), _carried),
)
