"""What a cast would cost: matrices rounded by candidate quantizers, in pieces of bounded size."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.bits.scan import Progress, Scan, decoded, with_progress
from halfstep.bits.values import Values, as_float32, even
from halfstep.errors import QuantizationError, unknown
from halfstep.formats import Float, Format
from halfstep.kernels import operators
from halfstep.kernels.cpu.cast_errors import ROOM, CastErrors, Rows, supports
from halfstep.kernels.cpu.comparison import Errors, compare, unit
from halfstep.quant import ROW, TENSOR, Quantizer, Scales, get_quantizer, get_scaling, layout, round_to
from halfstep.text import percent


# ---- limits of a format ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The magnitudes at which rounding to nearest in a format changes, each a float32, so that comparisons are
    exact."""

    format: Format
    overflows: bool
    """Whether larger values become infinite; otherwise they saturate at the largest value."""
    beyond: float
    """Values from here on are beyond the format."""
    normal: float
    """Values below become subnormal or zero."""
    vanishing: float
    """Values up to here become zero; negative where none does."""

    def zeroed(self, magnitudes: Tensor, zeros: int) -> int:
        """How many of the magnitudes become zero, without those that are zero already."""
        return int(torch.count_nonzero(magnitudes <= self.vanishing)) - zeros if self.vanishing >= 0 else 0

    def subnormal(self, magnitudes: Tensor, below: int) -> int:
        """How many become subnormal; `below` of them are zero already, or become zero."""
        return int(torch.count_nonzero(magnitudes < self.normal)) - below if self.normal > 0 else 0

    def over(self, magnitudes: Tensor) -> int:
        """How many are beyond the format."""
        return int(torch.count_nonzero(magnitudes >= self.beyond))


@cache
def limits_of(format: Format, stored: bool) -> Limits:
    """The limits of a format, for tensors stored in it (IEEE overflow) or rounded to it by a quantizer (saturating).

    They are those of positive values. Negative ones mirror them, except in some codebooks and in formats without a
    sign.
    """
    overflows = stored and isinstance(format, Float) and format.has_infinity
    beyond, normal = _next(format.max), 0.0
    if isinstance(format, Float):
        # The tie above the largest value has an odd neighbour below it, so it rounds to infinity.
        beyond = format.max + 2.0 ** (format.max_exponent - format.mantissa_bits - 1) if overflows else beyond
        # The tie below the smallest normal value rounds up to it, which is even.
        normal = float(_float32(format.min_normal - format.min_subnormal / 2))
    tie = format.smallest / 2
    below = _next(tie, 0.0)
    vanishing = tie if _vanishes(tie, format) else below if _vanishes(below, format) else -1.0
    return Limits(format, overflows, beyond, normal, vanishing)


def _vanishes(value: float, format: Format) -> bool:
    return float(round_to(torch.tensor([value], dtype=torch.float64, device="cpu"), format)) == 0.0


def _next(value: float, toward: float = float("inf")) -> float:
    return float(torch.nextafter(_float32(value), _float32(toward)))


def _float32(value: float) -> Tensor:
    """The value in float32; infinite, or zero, beyond its range."""
    return torch.tensor(value, dtype=torch.float64, device="cpu").float()


# ---- trial casts -----------------------------------------------------------------------------------------------------

_E4M3, _ABSMAX = get_quantizer("fp8_128x128"), get_scaling("absmax")
CANDIDATES: Mapping[str, Quantizer] = {
    "fp16": get_quantizer("fp16", overflow="ieee"),
    "bf16": get_quantizer("bf16", overflow="ieee"),
    "e4m3fn_tensor": replace(_E4M3, scales=Scales(TENSOR, _ABSMAX)),
    "e4m3fn_row": replace(_E4M3, scales=Scales(ROW, _ABSMAX)),
    "e4m3fn_128x128": _E4M3,
    "mxfp8": get_quantizer("mxfp8"),
    "int8": get_quantizer("int8_row"),
    "mxfp4": get_quantizer("mxfp4"),
    "nvfp4": get_quantizer("nvfp4"),
    "nf4": get_quantizer("nf4"),
}
"""The casts to try, by name. Scales of FP8 and int8 map a tile's amax to the format's largest value."""

WORST = 10
"""How many tensors a table names for each format."""

_MANY = 1 << 18  # values from which on it is faster to round each 16-bit code once


def candidates(names: Sequence[str]) -> dict[str, Quantizer]:
    """The candidates with these names; all of them for "all".

    Raises:
        QuantizationError: an unknown name.
    """
    if list(names) == ["all"]:
        return dict(CANDIDATES)
    for name in names:
        if name not in CANDIDATES:
            raise QuantizationError(unknown("format to try", name, (*CANDIDATES, "all")))
    return {name: CANDIDATES[name] for name in names}


@dataclass(frozen=True)
class Cast:
    """The effect of a cast to one format, on one tensor or several."""

    format: str
    sqnr: float | None
    """10 log10 of the sum of x^2 over the sum of squared errors, in decibels; None where no finite value changes."""
    overflowing: int
    """The number of values that become infinite or NaN."""
    zeroed: int
    """The number of values that become zero."""
    largest_error: float
    """The largest relative error of the other values."""
    values: int
    nbytes: int
    """Bytes of codes and scales."""
    saved: int
    """Bytes saved."""

    @property
    def decibels(self) -> str:
        """`sqnr` as text."""
        return f"{self.sqnr:.1f}" if self.sqnr is not None else "-" if self.overflowing else "exact"

    @property
    def harm(self) -> str | None:
        """The worst effect: the share that overflows, or else the decibels; None where nothing changes."""
        if self.overflowing:
            return f"{percent(self.overflowing / self.values)} overflows"
        return None if self.sqnr is None else f"{self.decibels} dB"


@dataclass(frozen=True)
class WhatIf:
    """A format's total cost, and the tensors that it hurts most (overflow first, then the lowest SQNR)."""

    total: Cast
    worst: tuple[tuple[str, Cast], ...]


class Trials:
    """The costs of casting matrices to each of the named formats.

    Raises:
        QuantizationError: an unknown name.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._quantizers = candidates(names)
        self._casts: dict[str, list[tuple[str, Cast, Errors]]] = {name: [] for name in self._quantizers}

    def add(self, name: str, tensor: Values, scan: Scan, progress: Progress | None = None) -> None:
        """Try every format on a scanned tensor, if it is a matrix; reads it a second time."""
        if not self._quantizers or not castable(tensor):
            return
        errors = _errors(tensor, scan, self._quantizers, progress)
        for format, quantizer in self._quantizers.items():
            size = nbytes(quantizer, tensor.shape)
            # Errors of tensors add up in the units of the values.
            cast = _cast(format, errors[format], tensor.numel, size, tensor.nbytes - size)
            scale, found = unit(scan.amax) ** 2, errors[format]
            absolute = found._replace(signal=found.signal * scale, noise=found.noise * scale)
            self._casts[format].append((name, cast, absolute))

    def found(self) -> tuple[WhatIf, ...]:
        """The cost of each format over all tensors, and the tensors that it hurts most."""
        return tuple(_together(name, casts) for name, casts in self._casts.items() if casts)


def nbytes(quantizer: Quantizer, shape: tuple[int, ...]) -> int:
    """Bytes of codes and scales of a tensor of this shape."""
    parts = layout(quantizer, shape, torch.float32).values()
    return sum(dtype.itemsize * math.prod(size or 0 for size in sizes) for dtype, sizes in parts)


def _errors(
    tensor: Values, scan: Scan, quantizers: Mapping[str, Quantizer], progress: Progress | None
) -> dict[str, Errors]:
    """The errors of each quantizer: per code, by kernels that round and compare at once, or by rounding, then
    comparing."""
    columns, amax = tensor.shape[-1], scan.amax
    by_code = scan.codes is not None and tensor.numel >= _MANY
    found = {name: _by_code(scan, tensor.dtype, q) for name, q in quantizers.items() if by_code and not _has_tiles(q)}
    rest = {name: q for name, q in quantizers.items() if name not in found}
    if not rest and progress is not None:
        progress(tensor.nbytes)
    plain = not scan.table.nonfinite and amax < ROOM
    fused = {name: CastErrors(q, amax) for name, q in rest.items() if plain and supports(q, columns)}
    others = {name: Errors() for name in rest if name not in fused}
    counted = next(iter(found.values()), None)
    signal, buffer = counted.signal if counted else 0.0, _Buffer()
    for chunk in stored_pieces(tensor, progress) if rest else ():
        if fused:
            rows = Rows(as_bits(chunk, tensor.dtype), columns)
            signal += 0.0 if counted else rows.squares(amax)
            for cast in fused.values():
                cast.add(rows)
        if others:
            x = torch.from_numpy(as_float32(chunk, tensor.dtype)).view(-1, columns)
            for name in others:
                others[name] += compare(x.view(-1).numpy(), _values(x, rest[name], scan, buffer).view(-1).numpy(), amax)
    return found | others | {name: cast.errors(signal, scan.table.nonzero) for name, cast in fused.items()}


def _has_tiles(quantizer: Quantizer) -> bool:
    """Whether the rounded value depends on more than the value itself and the tensor's amax."""
    return quantizer.scales is not None and quantizer.scales.tile != TENSOR


def _by_code(scan: Scan, dtype: str, quantizer: Quantizer) -> Errors:
    """The errors of a tensor with few distinct values, from how often each occurs."""
    assert scan.codes is not None
    values = decoded(dtype)
    used = np.flatnonzero((scan.codes > 0) & np.isfinite(values))
    x, times = values[used], scan.codes[used]
    y = _values(torch.from_numpy(x.astype(np.float32))[None], quantizer, scan, _Buffer()).double().numpy()[0]
    kept = np.isfinite(y)
    error = np.where(kept, y - x, 0.0)
    zeroed = (y == 0) & (x != 0)
    size = unit(scan.amax)
    share = np.abs(error[kept & (y != 0)]) / np.abs(x[kept & (y != 0)])
    return Errors(
        float((times * (x / size) ** 2).sum()),
        float((times * (error / size) ** 2).sum()),
        int(times[zeroed].sum()),
        int(times[~kept].sum()),
        float(share.max(initial=0.0)),
    )


class _Buffer:
    """A reused buffer, since allocating new memory costs as much as a cast."""

    def __init__(self) -> None:
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    def like(self, x: Tensor) -> Tensor:
        if x.numel() > self._values.numel():
            self._values = torch.empty(x.numel(), dtype=torch.float32, device="cpu")
        return self._values[: x.numel()].view(x.shape)


def _values(rows: Tensor, quantizer: Quantizer, scan: Scan, buffer: _Buffer) -> Tensor:
    """Some rows of a scanned tensor, quantized and dequantized, in the buffer."""
    x = rows
    if needs_largest(quantizer):  # the single scale of a tensor with infinities or NaN is NaN
        x = with_largest(rows, math.nan if not _has_tiles(quantizer) and scan.table.nonfinite else scan.amax)
    out = buffer.like(x)
    if quantizer.scales is None:
        operators.round_into(x, out, quantizer.format, quantizer.rounding, quantizer.overflow, None)
    else:
        operators.round_tiles_into(x, out, quantizer, None)
    return out[: len(rows)]


def _cast(name: str, errors: Errors, values: int, size: int, saved: int) -> Cast:
    sqnr = None if not errors.noise else 10 * math.log10(errors.signal / errors.noise) if errors.signal else None
    return Cast(name, sqnr, errors.infinite, errors.zeroed, errors.largest, values, size, saved)


def _together(name: str, casts: list[tuple[str, Cast, Errors]]) -> WhatIf:
    columns = list(zip(*(errors for _, _, errors in casts), strict=True))
    errors = Errors(sum(columns[0]), sum(columns[1]), sum(columns[2]), sum(columns[3]), max(columns[4]))
    every = [cast for _, cast, _ in casts]
    total = _cast(name, errors, sum(c.values for c in every), sum(c.nbytes for c in every), sum(c.saved for c in every))
    hurt = sorted(
        ((tensor, cast) for tensor, cast, _ in casts),
        key=lambda item: (-item[1].overflowing, math.inf if item[1].sqnr is None else item[1].sqnr),
    )
    return WhatIf(total, tuple(hurt[:WORST]))


# ---- pieces of a tensor ----------------------------------------------------------------------------------------------

PIECE = 1 << 20
"""Values rounded at a time, or as many as 128 rows hold: they stay in the caches for all candidates."""

_LONGEST = 1 << 17  # columns: 128 rows of them are 64 MB in float32
_ROWS = 128  # a piece has a multiple of this many rows, so that no tile is split


def castable(tensor: Values) -> bool:
    """Whether a cast is tried: for floating-point matrices; vectors, such as norms and biases, are not quantized."""
    floating = tensor.dtype in ("float32", "bfloat16", "float16")
    return floating and len(tensor.shape) > 1 and 0 < tensor.shape[-1] <= _LONGEST and tensor.numel > 0


def needs_largest(quantizer: Quantizer) -> bool:
    """Whether a scale depends on the whole tensor, so that a piece alone would get another one."""
    scales = quantizer.scales
    return scales is not None and (scales.tile == TENSOR or "tensor_scale" in scales.rule.layout((1, 1)))


def with_largest(rows: Tensor, amax: float) -> Tensor:
    """The rows and one more, which contains the tensor's amax: so a piece gets the tensor's scales."""
    more = torch.zeros(1, rows.shape[1], dtype=torch.float32, device="cpu")
    more[0, 0] = amax
    return torch.cat([rows, more])


def stored_pieces(tensor: Values, progress: Progress | None = None) -> Iterator[NDArray[Any]]:
    """The rows of a tensor as stored, flat, a multiple of 128 at a time (the last piece may have fewer)."""
    columns = tensor.shape[-1]
    return with_progress(even(tensor, max(_ROWS, PIECE // columns // _ROWS * _ROWS) * columns), progress)


def pieces(tensor: Values) -> Iterator[Tensor]:
    """The rows in float32, as matrices."""
    for chunk in stored_pieces(tensor):
        yield torch.from_numpy(as_float32(chunk, tensor.dtype)).view(-1, tensor.shape[-1])


def as_bits(chunk: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Stored float32, bfloat16 or float16 as kernels take it (`kernels.cpu.arrays`)."""
    return chunk.view({"float32": np.uint32, "bfloat16": np.uint16, "float16": np.int16}[dtype])
