"""The ways of scaling that a GPU's FP8 and FP4 tensor cores take, and the sizes of their products."""

from typing import NamedTuple

import torch
from torch import Tensor

from halfstep import formats
from halfstep.quant import Quantizer
from halfstep.quant.tile import ROW, TENSOR, Tile, block, square


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
