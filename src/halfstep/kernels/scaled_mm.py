"""Products on a GPU's own units for 8 and 4 bits, through torch.nn.functional.scaled_mm."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import formats
from halfstep.formats import Format
from halfstep.kernels.scale_layouts import outer, padded, swizzled
from halfstep.quant import Quantized, Quantizer
from halfstep.quant.tile import ROW, TENSOR, Tile, block, square


class Operand(Protocol):
    """A matrix of FP8 numbers, `values` times `scale`: a float32 scalar, or one number a row or column."""

    @property
    def values(self) -> Tensor: ...

    @property
    def scale(self) -> Tensor | None: ...


class Kind(NamedTuple):
    """A way of sharing scales that units take, and where."""

    recipe: str
    """The name of `torch.nn.functional.ScalingType`."""
    words: str
    tiles: tuple[Tile, ...]
    since: tuple[int, int]
    """The compute capability that it came with."""
    only: bool = False
    """Whether units of another generation do without it."""
    shared: int = 16
    """What the shared dimension is a multiple of."""


_ALIGNED = 16  # the columns of a product, and its shared dimension at least, are multiples of it
_TENSOR = Kind("TensorWise", "one scale a tensor", (TENSOR,), (8, 9))
_ROW = Kind("RowWise", "a scale a row", (ROW, ROW.transposed), (9, 0))
_ROWS_OF_128 = Kind("BlockWise1x128", "tiles of 1x128", (block(128), block(128).transposed), (9, 0), True, 128)
_SQUARES_OF_128 = Kind("BlockWise128x128", "tiles of 128x128", (square(128),), (9, 0), True, 128)
_MX = Kind("BlockWise1x32", "tiles of 1x32", (block(32), block(32).transposed, square(32)), (10, 0), True, 32)
_NV = Kind("BlockWise1x16", "tiles of 1x16", (block(16), block(16).transposed, square(16)), (10, 0), True, 32)
_KINDS = (_TENSOR, _ROW, _ROWS_OF_128, _SQUARES_OF_128, _MX, _NV)
_BLOCKS = (_ROWS_OF_128, _SQUARES_OF_128)
_PAIRS = {(kind, kind) for kind in _KINDS} - {(_SQUARES_OF_128, _SQUARES_OF_128)}
_PAIRS |= {(_TENSOR, _ROW), (_ROW, _TENSOR), _BLOCKS, _BLOCKS[::-1]}
_CUDA = (12, 9)  # whose cuBLASLt was the first to take tiles of 128

_FP8 = {formats.get(dtype).key: dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
_FP4 = {formats.get("e2m1fn").key: torch.float4_e2m1fn_x2}
DTYPES = frozenset({*_FP8.values(), *_FP4.values()})
"""The dtypes that units take."""

PAYS = 1 / 600
"""See `pays`."""


def pays(rows: int, shared: int, across: int) -> bool:
    """Whether the forward and backward of a layer of those sizes should take less time with FP8 products, rounding
    included, than in bf16: where 1/rows + 1/shared + 1/across < `PAYS`.

    Derived, not measured, for an H100: the three products save 6 rows shared across (1/790 - 1/1400) TFLOP/s^-1, and
    rounding moves 6 bytes for each number of the three matrices at 3 TB/s. No path depends on it.
    """
    return 1 / rows + 1 / shared + 1 / across < PAYS


def dtype_of(format: Format) -> torch.dtype | None:
    """torch's dtype of a format that units take; that of FP4 holds two numbers."""
    return _FP8.get(format.key) or _FP4.get(format.key)


def in_dtype(codes: Tensor, format: Format) -> Tensor:
    """Codes, a byte each or two in a byte, as numbers of torch's dtype of their format."""
    dtype = dtype_of(format)
    assert dtype is not None
    return codes.view(dtype)


def native_dtype(quantizer: Quantizer, device: torch.device) -> torch.dtype | None:
    """The dtype in which units there take operands of that quantizer; None where they do not, or there are none."""
    return dtype_of(quantizer.format) if is_there(device) and refusal(quantizer, device) is None else None


def outer_dtype(quantizer: Quantizer, device: torch.device) -> torch.dtype | None:
    """`native_dtype` where the scales are one a tensor or a row, which multiply the sum; None for smaller tiles."""
    native = native_dtype(quantizer, device)
    return None if native is None or is_tiled(quantizer) else native


def is_there(device: torch.device) -> bool:
    """Whether there may be such units."""
    return _capability(device) != (0, 0)


def is_tiled(quantizer: Quantizer) -> bool:
    """Whether units take scales of the quantizer that are of less than a row."""
    return _kind(quantizer) not in (None, _TENSOR, _ROW)


def refusal(quantizer: Quantizer, device: torch.device) -> str | None:
    """Why operands of that quantizer are not multiplied by units for their format there; None where they are."""
    if (why := _lacks_units(device)) is not None:
        return why
    format, kind = quantizer.format, _kind(quantizer)
    if kind is not _NV and format.key not in _FP8:
        if format.key not in _FP4:
            return f"{format.name}: FP8 units take float8_e4m3fn and float8_e5m2"
        return f"{format.name} with {quantizer.scales}: FP4 units take tiles of 1x16 with two levels of scales"
    apart = quantizer.clamp is not None or quantizer.outliers is not None
    if apart or (quantizer.scales is not None and quantizer.scales.rule.inner is not None):
        return f"{quantizer.scales} with numbers kept apart, or by a rule of several steps: units take codes and scales"
    if kind is None:
        tile = "no scale" if quantizer.scales is None else f"tiles of {quantizer.scales.tile} ({quantizer.scales.rule})"
        return f"{tile}: units take one scale a tensor or a row, tiles of 1x128 and 128x128, of 1x32, of 1x16"
    found, needed = _capability(device), _text(kind.since)
    if found < kind.since or (kind.only and found[0] != kind.since[0]):
        needed, verb = (f"{kind.since[0]}.x alone", " need") if kind.only else (needed, " needs")
        return f"{kind.words}{verb} compute capability {needed}; {_text(found)} found"
    if kind in _BLOCKS and _toolkit() < _CUDA:
        return f"{kind.words} need a torch built with CUDA {_text(_CUDA)} or newer; {_text(_toolkit())} found"
    return None


def product_refusal(lhs: Quantizer | None, rhs: Quantizer | None, device: torch.device) -> str | None:
    """Why a product of operands of those quantizers is not formed by units there, whatever its sizes; None where it is.
    Tiles lie as `recipe.Matmul` has them: along the shared dimension."""
    for quantizer in (lhs, rhs):
        if quantizer is not None and (why := refusal(quantizer, device)) is not None:
            return why
    if lhs is None or rhs is None:
        return "one operand of a product is not rounded: units take both in few bits"
    one, other = _kind(lhs), _kind(rhs)
    assert one is not None
    assert other is not None
    if (one, other) not in _PAIRS:
        return f"{one.words} times {other.words}: units take no such pair"
    if dtype_of(lhs.format) == dtype_of(rhs.format) == torch.float8_e5m2:
        return "E5M2 times E5M2: FP8 units take E4M3 on one side at least"
    return None


def misfit(lhs: Quantizer, rhs: Quantizer, sizes: tuple[int, int, int]) -> str | None:
    """Why units do not take sizes (rows, shared, columns) of a product of those operands; None where they do."""
    one, other = _kind(lhs), _kind(rhs)
    assert one is not None
    assert other is not None
    return _misfit(one, other, *sizes)


def _misfit(one: Kind, other: Kind, rows: int, shared: int, across: int) -> str | None:
    found = f"a product {rows}x{shared} times {shared}x{across}"
    if not (rows and shared and across):
        return f"{found} is empty"
    if shared % max(one.shared, other.shared):
        return f"{found}: its shared dimension is no multiple of {max(one.shared, other.shared)}"
    if across % (128 if other is _SQUARES_OF_128 else _ALIGNED):
        return f"{found}: its columns are no multiple of {128 if other is _SQUARES_OF_128 else _ALIGNED}"
    # The stride of a row's scales is the number of rows, and cuBLASLt reads them 16 bytes at a time.
    least = {_ROWS_OF_128: 4, _SQUARES_OF_128: 128}.get(one, 1)
    return f"{found}: its rows are no multiple of {least}" if rows % least else None


def takes(
    lhs: Quantizer | None, rhs: Quantizer | None, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether units there form a product (rows, shared, columns) of operands of those quantizers, in `dtype`."""
    if not is_there(device) or lhs is None or rhs is None or product_refusal(lhs, rhs, device) is not None:
        return False
    whole = _kind(lhs) is _TENSOR and _kind(rhs) is _TENSOR
    return dtype in _results(whole) and misfit(lhs, rhs, sizes) is None


def _results(whole: bool) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float16) if whole else (torch.bfloat16,)


def _kind(quantizer: Quantizer) -> Kind | None:
    """How the quantizer's scales reach units; None where they cannot."""
    scales = quantizer.scales
    if scales is None or not scales.rule.linear or "zero_point" in scales.rule.layout((1, 1)):
        return None
    kind = next((kind for kind in _KINDS if scales.tile in kind.tiles), None)
    if kind is _TENSOR and quantizer.stateful is None and not quantizer.factors:
        return None
    if kind is _MX and scales.rule.holds != "float8_e8m0fnu":
        return None
    if kind is _NV and not (scales.rule.two_level and quantizer.format.key in _FP4):
        return None
    return kind


def _lacks_units(device: torch.device) -> str | None:
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; 2.10 and newer do"
    if _capability(device) == (0, 0):
        return f"no FP8 units on {device.type} here"
    if _capability(device) < (8, 9):
        return f"compute capability {_text(_capability(device))}: FP8 units came with 8.9"
    return None


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def _toolkit() -> tuple[int, int]:
    """The CUDA that torch is built with; the first that does where torch does not tell."""
    major, minor = (int(part) for part in (torch.version.cuda or _text(_CUDA)).split(".")[:2])
    return major, minor


_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a traced graph takes the answer
_toolkit._dynamo_marked_constant = True  # type: ignore[attr-defined]


def supports(lhs: Operand, rhs: Operand, dtype: torch.dtype) -> bool:
    """Whether these two have a native product in `dtype`: of FP8 units' dtypes, not both E5M2, with aligned sides."""
    dtypes = {lhs.values.dtype, rhs.values.dtype}
    if not dtypes <= set(_FP8.values()) or dtypes == {torch.float8_e5m2}:
        return False
    one, other = (_TENSOR if side.scale is not None and side.scale.dim() == 0 else _ROW for side in (lhs, rhs))
    whole = one is _TENSOR and other is _TENSOR
    (rows, shared), across = lhs.values.shape, rhs.values.shape[1]
    return dtype in _results(whole) and _misfit(one, other, rows, shared, across) is None


def run(lhs: Operand, rhs: Operand, bias: Tensor | None, dtype: torch.dtype, multiplier: float | None = None) -> Tensor:
    """lhs (rows, shared) times rhs (shared, columns), each times its scale, times multiplier, plus bias, rounded to
    dtype.

    Units want the rows of lhs and the columns of rhs one after another in memory; what does not lie so is copied.
    They sum with an accuracy of their own; torch is asked for the accurate accumulation, not for the fast one.
    """
    scales = [_scale(side) for side in (lhs, rhs)]
    if multiplier is not None:
        scales[0] = scales[0] * multiplier
    kind: Any = F.ScalingType.TensorWise
    if any(scale.dim() for scale in scales):
        kind = F.ScalingType.RowWise
        sizes = (lhs.values.shape[0], 1), (1, rhs.values.shape[1])
        scales = [scale.expand(size).contiguous() for scale, size in zip(scales, sizes, strict=True)]
    columns = rhs.values.t().contiguous().t()
    bias = None if bias is None else bias.to(dtype)
    return F.scaled_mm(
        lhs.values.contiguous(), columns, scales[0], kind, scales[1], kind, bias=bias, output_dtype=dtype
    )


def _scale(side: Operand) -> Tensor:
    return side.values.new_ones((), dtype=torch.float32) if side.scale is None else side.scale


def supports_tiled(lhs: Quantized, rhs: Quantized, dtype: torch.dtype, multiplier: float | None = None) -> bool:
    """Whether `run_tiled` takes these two."""
    sizes = (lhs.matrix_shape[0], lhs.matrix_shape[1], rhs.matrix_shape[0])
    fits = takes(lhs.quantizer, rhs.quantizer, sizes, dtype, lhs.codes.device)
    return fits and (multiplier is None or _kind(lhs.quantizer) is not _MX)  # whose scales are powers of two


def run_tiled(
    lhs: Quantized, rhs: Quantized, bias: Tensor | None, dtype: torch.dtype, multiplier: float | None = None
) -> Tensor:
    """lhs (rows, shared) times the transpose of rhs (columns, shared), both in codes with tiles along the shared
    dimension, times multiplier, plus bias, rounded to dtype. Nothing is copied but scales that do not lie as units
    read them."""
    sides = [_handed(side) for side in (lhs, rhs)]
    (a, scale_a, kind_a, order_a), (b, scale_b, kind_b, order_b) = sides
    if multiplier is not None:
        scale_a = [*scale_a[:-1], scale_a[-1] * multiplier]
    bias = None if bias is None else bias.to(dtype)
    return F.scaled_mm(
        a, b.t(), scale_a, kind_a, scale_b, kind_b, order_a or None, order_b or None, bias=bias, output_dtype=dtype
    )


def _handed(side: Quantized) -> tuple[Tensor, list[Tensor], list[Any], list[Any]]:
    """The codes of one side, its scales, what they are scales of, and how they lie."""
    quantizer, kind, order = side.quantizer, _kind(side.quantizer), F.SwizzleType
    assert kind is not None
    assert quantizer.scales is not None
    codes = in_dtype(side.codes, quantizer.format)
    recipe = [getattr(F.ScalingType, kind.recipe)]
    if kind in _BLOCKS:
        scales = quantizer.scales.rule.multiplier(side.tensors, quantizer.format).float()
        return codes, [outer(scales) if kind is _ROWS_OF_128 else padded(scales)], recipe, []
    scales, high = side.scale, quantizer.scales.tile.rows
    scales = scales if high == 1 else scales.repeat_interleave(high, 0).narrow(0, 0, side.matrix_shape[0])
    if kind is _MX:
        return codes, [swizzled(scales).view(torch.float8_e8m0fnu)], recipe, [order.SWIZZLE_32_4_4]
    levels = [swizzled(scales).view(torch.float8_e4m3fn), side.tensors["tensor_scale"]]
    return codes, levels, [*recipe, F.ScalingType.TensorWise], [order.SWIZZLE_32_4_4, order.NO_SWIZZLE]
