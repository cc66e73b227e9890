"""Matrices in pieces of bounded size, cut between tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfstep.bits.places import as_float32
from halfstep.bits.scan import Progress
from halfstep.bits.values import TYPES, Values
from halfstep.quant import Quantizer
from halfstep.quant.tile import TENSOR


PIECE = 1 << 20
"""Values quantised at a time, or as many as 128 rows hold: caches keep them through all candidates."""

_LONGEST = 1 << 17  # columns: 128 rows of them are 64 MB in float32
_ROWS = 128  # a piece has a multiple of this, so that no tile is cut


def castable(tensor: Values) -> bool:
    """Whether a cast is tried: matrices of floating-point weights; vectors, such as norms and biases, stay."""
    floating = tensor.dtype in ("float32", "bfloat16", "float16")
    return floating and len(tensor.shape) > 1 and 0 < tensor.shape[-1] <= _LONGEST and tensor.numel > 0


def needs_largest(quantizer: Quantizer) -> bool:
    """Whether a scale is of the whole tensor, so that a piece alone would get another one."""
    scales = quantizer.scales
    return scales is not None and (scales.tile == TENSOR or "tensor_scale" in scales.rule.layout((1, 1)))


def with_largest(rows: Tensor, amax: float) -> Tensor:
    """The rows and one more, which holds the tensor's largest magnitude: with it a piece's scales are the tensor's."""
    more = torch.zeros(1, rows.shape[1], dtype=torch.float32, device="cpu")
    more[0, 0] = amax
    return torch.cat([rows, more])


def stored_pieces(tensor: Values, progress: Progress | None = None) -> Iterator[NDArray[Any]]:
    """The rows of a tensor as they are stored, flat, some whole multiple of 128 at a time (the last ones fewer)."""
    columns = tensor.shape[-1]
    rows = max(_ROWS, PIECE // columns // _ROWS * _ROWS)
    for chunk in even(tensor, rows * columns):
        yield chunk
        if progress is not None:
            progress(chunk.nbytes)


def even(tensor: Values, count: int) -> Iterator[NDArray[Any]]:
    """The values in runs of `count` each, the last one shorter, wherever the source's own pieces end.

    Runs are copied only where a piece of the source ends within them, as where a map of a file does.
    """
    held: list[NDArray[Any]] = []
    size, itemsize = 0, TYPES[tensor.dtype].piece.itemsize if tensor.dtype in TYPES else 4
    for chunk in tensor.chunks(count * itemsize):
        held.append(chunk)
        size += chunk.size
        if size >= count:
            joined = _joined(held)
            yield joined[:count]
            held, size = ([joined[count:]], size - count) if size > count else ([], 0)
    if held:
        yield _joined(held)


def _joined(held: list[NDArray[Any]]) -> NDArray[Any]:
    if len(held) == 1:
        return held[0]
    joined = np.concatenate(held)
    joined.flags.writeable = False  # as a file's pieces are: kernels are compiled for those
    return joined


def pieces(tensor: Values) -> Iterator[Tensor]:
    """The rows in float32, as matrices."""
    for chunk in stored_pieces(tensor):
        yield torch.from_numpy(as_float32(chunk, tensor.dtype)).view(-1, tensor.shape[-1])


def as_bits(chunk: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Stored float32, bfloat16 or float16 as kernels take it (`kernels.cpu.arrays`)."""
    return chunk.view({"float32": np.uint32, "bfloat16": np.uint16, "float16": np.int16}[dtype])
