"""A matmul of two sides in codes on tensor cores: `torch.nn.functional.scaled_mm`, one opaque operator in a graph.

Inductor lowers torch's own operator to its first version, whose scales of 1x128 lie in another order, and refuses
swizzled ones. Scales lie as tensor cores read them: in their order in memory, with strides and padding.

Source: the checks of PyTorch's ScaledBlas.cpp; the order of blocks of 128x4 scales is cuBLASLt's for one-dimensional
block scaling ("32_4_4").
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.kernels.operator import Operator
from halfstep.kernels.unit_kinds import MX, NV, ROWS, ROWS_OF_128, SQUARES_OF_128, Kind
from halfstep.quant.padding import pad


SHORT = {MX: torch.float8_e8m0fnu, NV: torch.float8_e4m3fn}
"""The kinds whose tiles' scales are `swizzled`, and the dtype of these."""
_NUMBERS = {kind.recipe: dtype for kind, dtype in SHORT.items()}


def outer(scales: Tensor) -> Tensor:
    """The scales of tiles of 1x128, (rows, tiles across), with strides (1, rows): itself where it lies so. One tile
    across may have another second stride, which is not supported."""
    return scales.t().contiguous().t()


def padded(scales: Tensor) -> Tensor:
    """The scales of tiles of 128x128, (tiles down, tiles across), transposed and with zeros to a multiple of 4: (across
    in fours, down) with strides (1, across in fours)."""
    return pad(scales, (0, -scales.shape[1] % 4)).contiguous().t()


def swizzled(scales: Tensor) -> Tensor:
    """The scales of short tiles along rows, (rows, tiles across), in one dimension: blocks of 128 rows and 4 tiles,
    filled up with zeros, one after another along the rows; in a block the rows 32 apart side by side.

    Entry (r, c) goes to ((r // 128) * ceil(tiles / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4.
    """
    rows, across = scales.shape
    whole = pad(scales, (0, -across % 4, 0, -rows % 128))
    blocks = whole.view(whole.shape[0] // 128, 4, 32, whole.shape[1] // 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1)


def swizzled_size(rows: int, across: int) -> int:
    """How many scales `swizzled` gives."""
    return -(-rows // 128) * -(-across // 4) * 512


class Side(NamedTuple):
    """One side of a product: codes (rows, shared), FP8 numbers or bytes of two FP4 numbers, and scales (rows, tiles
    across), as many as its tiles have; a tensor's is a scalar. Those of short tiles may be `swizzled` already."""

    codes: Tensor
    kind: Kind
    scale: Tensor
    whole: Tensor | None = None
    """Of two levels of scales, the tensor's."""


def units_mm(lhs: Side, rhs: Side, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """lhs (rows, shared) times the transpose of rhs (columns, shared), plus bias, rounded to dtype."""
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
    """What a side's scales are of, the scales in the order that units read them in, and that order's name."""
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
