"""A matmul of codes on FP8 and FP4 tensor cores: the scalings and sizes that they take, and the layouts of scales.

The matmul is `torch.nn.functional.scaled_mm`, wrapped as one opaque operator of a graph. Inductor lowers torch's own
operator to its first version, which expects the scales of 1x128 tiles in another order, and refuses swizzled ones. The
scales given here have the layout that tensor cores read: order, strides and padding.

Source: the checks of PyTorch's ScaledBlas.cpp; the order of blocks of 128x4 scales is cuBLASLt's for one-dimensional
block scaling ("32_4_4").
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import formats
from halfstep.kernels.operator import Operator
from halfstep.quant import Quantizer
from halfstep.quant.tile import ROW, TENSOR, Tile, block, square


# ---- ways of scaling -------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A granularity of scales that tensor cores take, and on which hardware and software."""

    recipe: str
    """The name in `torch.nn.functional.ScalingType`."""
    words: str
    tiles: tuple[Tile, ...]
    since: tuple[int, int]
    """The first compute capability that has it."""
    majors: tuple[int, ...] = ()
    """The major compute capabilities that take it; empty: all since then."""
    shared: int = 16
    """The divisor that the shared dimension must have."""
    wants: tuple[tuple[int, str, tuple[int, int]], ...] = ()
    """For a major compute capability, the first version of torch, or of the CUDA that torch is built with, that
    supports it."""


_ALIGNED = 16  # the columns of a result must be a multiple of it, the shared dimension too or of more
TENSORS = Kind("TensorWise", "one scale a tensor", (TENSOR,), (8, 9))
# Before 2.12 torch launches the kernel for 8.9 on another stream than the current one (pytorch/pytorch#177651), and
# 2.10 raised an error on 12.x (pytorch/pytorch#192707).
ROWS = Kind(
    "RowWise", "a scale a row", (ROW, ROW.transposed), (8, 9), wants=((8, "torch", (2, 12)), (12, "torch", (2, 12)))
)
_BLOCK = (9, 0), (9,), 128, ((9, "CUDA", (12, 9)),)  # the first cuBLASLt that takes them
ROWS_OF_128 = Kind("BlockWise1x128", "tiles of 1x128", (block(128), block(128).transposed), *_BLOCK)
SQUARES_OF_128 = Kind("BlockWise128x128", "tiles of 128x128", (square(128),), *_BLOCK)
# On 12.x reported to work with CUDA 13 (pytorch/pytorch#198126), in the only layout used here: rows by rows.
MX = Kind(
    "BlockWise1x32", "tiles of 1x32", (block(32), block(32).transposed, square(32)), (10, 0), (10, 12), 32,
    ((12, "CUDA", (13, 0)),),
)  # fmt: skip
NV = Kind("BlockWise1x16", "tiles of 1x16", (block(16), block(16).transposed, square(16)), (10, 0), (10,), 32)
KINDS = (TENSORS, ROWS, ROWS_OF_128, SQUARES_OF_128, MX, NV)
BLOCKS = (ROWS_OF_128, SQUARES_OF_128)
NUMBERS = (ROWS, *BLOCKS)
"""Kinds whose scales are float32, whatever the quantizer stores."""
PAIRS = {(kind, kind) for kind in KINDS} - {(SQUARES_OF_128, SQUARES_OF_128)}
PAIRS |= {(TENSORS, ROWS), (ROWS, TENSORS), BLOCKS, BLOCKS[::-1]}

FP8 = {formats.get(dtype).key: dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
FP4 = {formats.get("e2m1fn").key: torch.float4_e2m1fn_x2} if hasattr(torch, "float4_e2m1fn_x2") else {}
DTYPES = frozenset({*FP8.values(), torch.uint8})
"""The dtypes of codes made for tensor cores: FP8, or bytes of two FP4 codes, for which Inductor has no dtype on a
CPU."""

PAYS = 1 / 600
"""The threshold of `pays`."""


def pays(rows: int, shared: int, across: int) -> bool:
    """Whether forward and backward of a layer of those sizes should take less time with FP8 matmuls, rounding included,
    than in bf16: where 1/rows + 1/shared + 1/across < `PAYS`.

    Derived, not measured, for an H100: the three matmuls save 6 rows shared across (1/790 - 1/1400) TFLOP/s^-1, and
    rounding moves 6 bytes per element of the three matrices at 3 TB/s. No path depends on it.
    """
    return 1 / rows + 1 / shared + 1 / across < PAYS


def dtype_of(format: formats.Format) -> torch.dtype | None:
    """torch's dtype of a format that tensor cores take; one element of FP4's dtype holds two values."""
    return FP8.get(format.key) or FP4.get(format.key)


def in_dtype(codes: Tensor, format: formats.Format) -> Tensor:
    """One-byte codes viewed in torch's dtype of their format; packed FP4 codes unchanged."""
    return codes.view(FP8[format.key]) if format.key in FP8 else codes


def is_tiled(quantizer: Quantizer) -> bool:
    """Whether tensor cores take the quantizer's scales, and these are of tiles smaller than a row."""
    return kind_of(quantizer) not in (None, TENSORS, ROWS)


def unfit(one: Kind, other: Kind, rows: int, shared: int, across: int) -> str | None:
    """Why tensor cores do not take a matmul (rows, shared, across) with sides of those kinds; None where they do."""
    found = f"a product {rows}x{shared} times {shared}x{across}"
    if not (rows and shared and across):
        return f"{found} is empty"
    if shared % max(one.shared, other.shared):
        return f"{found}: its shared dimension is no multiple of {max(one.shared, other.shared)}"
    if across % (128 if other is SQUARES_OF_128 else _ALIGNED):
        return f"{found}: its columns are no multiple of {128 if other is SQUARES_OF_128 else _ALIGNED}"
    # The stride of a row's scales is the number of rows, and cuBLASLt reads them 16 bytes at a time.
    least = {ROWS_OF_128: 4, SQUARES_OF_128: 128}.get(one, 1)
    return f"{found}: its rows are no multiple of {least}" if rows % least else None


def kind_of(quantizer: Quantizer) -> Kind | None:
    """The kind in which tensor cores take the quantizer's scales; None where they do not."""
    scales = quantizer.scales
    if scales is None or not scales.rule.linear or "zero_point" in scales.rule.layout((1, 1)):
        return None
    kind = next((kind for kind in KINDS if scales.tile in kind.tiles), None)
    lacking = (
        (kind is TENSORS and quantizer.stateful is None and not quantizer.factors)
        or (kind is MX and scales.rule.holds != "float8_e8m0fnu")
        or (kind is NV and not ("tensor_scale" in scales.rule.layout((1, 1)) and quantizer.format.key in FP4))
    )
    return None if lacking else kind


# ---- layouts of scales -----------------------------------------------------------------------------------------------

SHORT = {MX: torch.float8_e8m0fnu, NV: torch.float8_e4m3fn}
"""The kinds whose scales are `swizzled`, and the dtype of these scales."""
_NUMBERS = {kind.recipe: dtype for kind, dtype in SHORT.items()}


def outer(scales: Tensor) -> Tensor:
    """The scales of 1x128 tiles, (rows, tiles across), with strides (1, rows): no copy where they are so already. With
    one tile across the second stride may differ, which is not supported."""
    return scales.t().contiguous().t()


def padded(scales: Tensor) -> Tensor:
    """The scales of 128x128 tiles, (tiles down, tiles across), zero-padded to a multiple of 4 across and transposed:
    (across in fours, down) with strides (1, across in fours)."""
    return F.pad(scales, (0, -scales.shape[1] % 4)).contiguous().t()


def swizzled(scales: Tensor) -> Tensor:
    """The scales of short tiles along rows, (rows, tiles across), as one dimension: blocks of 128 rows and 4 tiles,
    zero-padded, ordered along the rows; within a block, rows 32 apart are adjacent.

    Entry (r, c) goes to ((r // 128) * ceil(tiles / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4.
    """
    rows, across = scales.shape
    whole = F.pad(scales, (0, -across % 4, 0, -rows % 128))
    blocks = whole.view(whole.shape[0] // 128, 4, 32, whole.shape[1] // 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1)


def swizzled_size(rows: int, across: int) -> int:
    """The number of scales that `swizzled` returns."""
    return -(-rows // 128) * -(-across // 4) * 512


# ---- the matmul ------------------------------------------------------------------------------------------------------


class Side(NamedTuple):
    """One operand of a matmul: codes (rows, shared), FP8 or bytes of two FP4 codes, and scales (rows, tiles across) of
    its tiles; a tensor's is a scalar. Those of short tiles may be `swizzled` already."""

    codes: Tensor
    kind: Kind
    scale: Tensor
    whole: Tensor | None = None
    """The tensor's scale, with two levels of scales."""


def units_mm(lhs: Side, rhs: Side, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """lhs (rows, shared) @ the transpose of rhs (columns, shared), plus bias, rounded to dtype."""
    sides = lhs.codes, rhs.codes, lhs.scale, rhs.scale, lhs.whole, rhs.whole, lhs.kind.recipe, rhs.kind.recipe
    return _OPERATOR(*sides, bias, dtype)  # type: ignore[no-any-return]


def _units_mm(
    lhs: Tensor, rhs: Tensor, scale: Tensor, other: Tensor, whole: Tensor | None, other_whole: Tensor | None,
    kind: str, other_kind: str, bias: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    one, scales, order = _laid(kind, scale, whole, lhs.shape[0])
    two, others, other_order = _laid(other_kind, other, other_whole, rhs.shape[0])
    if other_kind == ROWS.recipe:
        others = others.t()
    a, b = (side.contiguous() for side in (lhs, rhs))
    if a.dtype == torch.uint8:
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
    return F.scaled_mm(a, b.t(), scales, one, others, two, order, other_order, bias=bias, output_dtype=dtype)


def _laid(kind: str, scale: Tensor, whole: Tensor | None, rows: int) -> tuple[Any, Any, Any]:
    """The `ScalingType` of a side's scales, the scales in the layout of tensor cores, and their `SwizzleType`."""
    name, order = getattr(F.ScalingType, kind), F.SwizzleType
    if kind in _NUMBERS:
        laid = scale if scale.dim() == 1 else swizzled(scale).view(_NUMBERS[kind])
        if kind == MX.recipe:
            return name, laid, order.SWIZZLE_32_4_4
        return [name, F.ScalingType.TensorWise], [laid, whole], [order.SWIZZLE_32_4_4, order.NO_SWIZZLE]
    if kind == ROWS.recipe:
        return name, scale.expand(rows, 1).contiguous(), None
    lay = {ROWS_OF_128.recipe: outer, SQUARES_OF_128.recipe: padded}.get(kind)
    return name, scale if lay is None else lay(scale), None


_OPERATOR = Operator(
    "units_mm(Tensor lhs, Tensor rhs, Tensor scale, Tensor other, Tensor? whole, Tensor? other_whole, str kind, "
    "str other_kind, Tensor? bias, ScalarType dtype) -> Tensor",
    _units_mm,
    like=lambda lhs, rhs, *rest: lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=rest[-1]),
)
