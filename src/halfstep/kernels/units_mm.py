"""A matmul of two sides in codes on FP8 and FP4 tensor cores, and the ways of scaling and the sizes that they take.

The matmul is `torch.nn.functional.scaled_mm`, one opaque operator in a graph. Inductor lowers torch's own operator to
its first version, whose scales of 1x128 lie in another order, and refuses swizzled ones. Scales lie as tensor cores
read them: in their order in memory, with strides and padding.

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
from halfstep.quant.tile import ROW, TENSOR, Tile, block, pad, square


# ---- ways of scaling -------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A way of sharing scales that tensor cores take, and where."""

    recipe: str
    """The name of `torch.nn.functional.ScalingType`."""
    words: str
    tiles: tuple[Tile, ...]
    since: tuple[int, int]
    """The compute capability that it came with."""
    majors: tuple[int, ...] = ()
    """The generations whose tensor cores take it; none named: all since then."""
    shared: int = 16
    """What the shared dimension is a multiple of."""
    wants: tuple[tuple[int, str, tuple[int, int]], ...] = ()
    """What a generation takes it from on: a version of torch, or of the CUDA that torch is built with."""


_ALIGNED = 16  # the columns of a product, and its shared dimension at least, are multiples of it
TENSORS = Kind("TensorWise", "one scale a tensor", (TENSOR,), (8, 9))
# Below 2.12 torch launches the kernel of 8.9 on another stream than the current one (pytorch/pytorch#177651), and 2.10
# gave an error on 12.x (pytorch/pytorch#192707).
ROWS = Kind(
    "RowWise", "a scale a row", (ROW, ROW.transposed), (8, 9), wants=((8, "torch", (2, 12)), (12, "torch", (2, 12)))
)
_BLOCK = (9, 0), (9,), 128, ((9, "CUDA", (12, 9)),)  # whose cuBLASLt was the first to take them
ROWS_OF_128 = Kind("BlockWise1x128", "tiles of 1x128", (block(128), block(128).transposed), *_BLOCK)
SQUARES_OF_128 = Kind("BlockWise128x128", "tiles of 128x128", (square(128),), *_BLOCK)
# On 12.x seen with CUDA 13 (pytorch/pytorch#198126), in the one layout that is ever asked for here: rows by rows.
MX = Kind(
    "BlockWise1x32", "tiles of 1x32", (block(32), block(32).transposed, square(32)), (10, 0), (10, 12), 32,
    ((12, "CUDA", (13, 0)),),
)  # fmt: skip
NV = Kind("BlockWise1x16", "tiles of 1x16", (block(16), block(16).transposed, square(16)), (10, 0), (10,), 32)
KINDS = (TENSORS, ROWS, ROWS_OF_128, SQUARES_OF_128, MX, NV)
BLOCKS = (ROWS_OF_128, SQUARES_OF_128)
NUMBERS = (ROWS, *BLOCKS)
"""Kinds whose scales are float32 numbers, whatever the quantizer keeps."""
PAIRS = {(kind, kind) for kind in KINDS} - {(SQUARES_OF_128, SQUARES_OF_128)}
PAIRS |= {(TENSORS, ROWS), (ROWS, TENSORS), BLOCKS, BLOCKS[::-1]}

FP8 = {formats.get(dtype).key: dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
FP4 = {formats.get("e2m1fn").key: torch.float4_e2m1fn_x2} if hasattr(torch, "float4_e2m1fn_x2") else {}
DTYPES = frozenset({*FP8.values(), torch.uint8})
"""The dtypes of codes that are made for units: FP8 numbers, or bytes of two FP4 numbers, for which Inductor has no
dtype on a CPU."""

PAYS = 1 / 600
"""See `pays`."""


def pays(rows: int, shared: int, across: int) -> bool:
    """Whether the forward and backward of a layer of those sizes should take less time with FP8 products, rounding
    included, than in bf16: where 1/rows + 1/shared + 1/across < `PAYS`.

    Derived, not measured, for an H100: the three products save 6 rows shared across (1/790 - 1/1400) TFLOP/s^-1, and
    rounding moves 6 bytes for each number of the three matrices at 3 TB/s. No path depends on it.
    """
    return 1 / rows + 1 / shared + 1 / across < PAYS


def dtype_of(format: formats.Format) -> torch.dtype | None:
    """torch's dtype of a format that tensor cores take; that of FP4 holds two numbers."""
    return FP8.get(format.key) or FP4.get(format.key)


def in_dtype(codes: Tensor, format: formats.Format) -> Tensor:
    """Codes of a byte each as numbers of torch's dtype of their format; two in a byte as they are."""
    return codes.view(FP8[format.key]) if format.key in FP8 else codes


def is_tiled(quantizer: Quantizer) -> bool:
    """Whether tensor cores take scales of the quantizer that are of less than a row."""
    return kind_of(quantizer) not in (None, TENSORS, ROWS)


def unfit(one: Kind, other: Kind, rows: int, shared: int, across: int) -> str | None:
    """Why tensor cores do not take a product (rows, shared, across) of sides of those kinds; None where they do."""
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
    """How the quantizer's scales reach units; None where they cannot."""
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


# ---- the matmul ------------------------------------------------------------------------------------------------------


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
