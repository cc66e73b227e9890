"""A sparse matrix times a dense one, in float32: each row's few numbers times rows of the other, added up in order."""

import numba
import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel
from halfstep.kernels.cpu.lanes import bits_of
from halfstep.kernels.cpu.runs import elementwise, multiply


def run(
    values: Tensor, columns: Tensor, starts: Tensor, width: int, down: bool, other: Tensor, scale: Tensor | None,
    out: Tensor,
) -> bool:  # fmt: skip
    """The sparse matrix (rows, width), or its transpose where it lies `down`, times `other`, and that times scale (of
    each column, or one), into `out`. False where that is not done here: it takes contiguous CPU matrices, the sparse
    one in float32."""
    if not (plain(values, torch.float32) and plain(other) and plain(out, torch.float32)) or not out.numel():
        return False
    parts = array(values, torch.float32), array(columns), array(starts)
    if down:
        turned = np.empty(len(values), np.float32), np.empty(len(values), np.int32), np.zeros(width + 1, np.int64)
        _turn.serial(*parts, *turned)
        parts = turned
    work = len(values) * out.shape[1] + out.numel()
    times = None if scale is None else array(scale.expand(1, out.shape[1]).contiguous(), torch.float32)
    _product(work, *parts, array(other).reshape(other.shape), times, array(out, torch.float32).reshape(out.shape))
    return True


@elementwise
def _add(out, values, others):
    for value, other in zip(values, others, strict=True):
        out = out + value * bits_of(other).float()
    return out


@Kernel
def _product(values, columns, starts, other, scale, out):
    for r in numba.prange(out.shape[0]):
        row = out[r]
        row[:] = 0
        last = starts[r + 1]
        rest = last - (last - starts[r]) % 4
        for i in range(starts[r], rest, 4):  # the sum stays in registers meanwhile
            four = values[i], values[i + 1], values[i + 2], values[i + 3]
            one, two, three = other[columns[i]], other[columns[i + 1]], other[columns[i + 2]]
            _add(row, four, (one, two, three, other[columns[i + 3]]))
        for i in range(rest, last):
            _add(row, (values[i],), (other[columns[i]],))
        if scale is not None:
            multiply(row, scale)


@Kernel
def _turn(values, columns, starts, turned, rows, begins):
    """The transposed matrix, each row in order."""
    for i in range(columns.size):
        begins[columns[i] + 1] += 1
    for c in range(begins.size - 1):
        begins[c + 1] += begins[c]
    place = begins[:-1].copy()
    for r in range(starts.size - 1):
        for i in range(starts[r], starts[r + 1]):
            at = place[columns[i]]
            turned[at], rows[at] = values[i], r
            place[columns[i]] = at + 1
