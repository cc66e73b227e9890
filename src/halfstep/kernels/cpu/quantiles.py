"""Signed quantiles (`quant.Clamp.bounds`): of a tensor by counting bits, of rows by keeping a few extreme values.

The upper 16 bits of a float32, transformed to order like the values, are one of 65,536 buckets. One pass counts; if
lower bits matter, a second pass extracts and sorts the values of at most four buckets.
"""

from typing import Any

import numpy as np
import torch
from numba import prange, types
from torch import Tensor

from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, SIGN, UPPER, bits_of, lanes
from halfstep.kernels.cpu.runs import elementwise
from halfstep.kernels.cpu.scales import larger
from halfstep.quant import Clamp


_BUCKETS = 1 << 16
_PARTS = 8  # parts of a tensor, each with counts of its own
_FEW = 64  # values kept at either end of a row; for a quantile further in, the row is sorted
_LOWER = 0xFFFF


def run(x: Tensor, out: Tensor, clamp: Clamp) -> bool:
    """Write the two quantiles of the tensor, or of each row, to `out` (2, 1) or (2, rows), float32. False where no
    kernel supports it: x must be a contiguous CPU matrix (fp32, bf16, fp16) that is not empty."""
    if not plain(x) or x.dim() != 2 or not 0 < x.numel() < 1 << 31:
        return False
    cut = clamp.estimate == "histogram"
    found = np.empty((2, out.shape[1]), np.float32)
    columns = x.shape[1] if clamp.tile == "row" else x.numel()
    (low, low_share), (high, high_share) = clamp.places(columns)
    places = np.array([low, min(low + 1, columns - 1), high, min(high + 1, columns - 1)])
    shares = np.array([low_share, high_share])
    if clamp.tile == "row":
        _rows(x.numel(), array(x).reshape(x.shape), places, shares, cut, found)
    else:
        _tensor(array(x), places, shares, cut or x.dtype == torch.bfloat16, found)
    out.copy_(torch.from_numpy(found))
    return True


@lanes(types.uint32)
def _ordered(value):
    """The bits of a value, transformed to order like the values."""
    bits = bits_of(value)
    return (bits > MAGNITUDE).pick(bits ^ 0xFFFFFFFF, bits | SIGN)


_order = elementwise(_ordered)


@lanes(types.float32)
def _number(ordered, cut):
    """The float with these ordered bits, or with their upper half."""
    bits = (ordered > MAGNITUDE).pick(ordered ^ SIGN, ordered ^ 0xFFFFFFFF)
    return cut.pick(bits & UPPER, bits).float()


@inner
def _quantile(ordered, place, share, cut):
    """The value interpolated between positions `place` and `place` + 1 of the ordered bits."""
    low, high = np.float64(_number(ordered[place], cut)), np.float64(_number(ordered[place + 1], cut))
    return np.float32(low + (high - low) * share)


# ---- of a tensor ----------------------------------------------------------------------------------------------------


@inner
def _note_buckets(x, counts):
    ordered = np.empty(CHUNK, np.uint32)
    for start in range(0, x.size, CHUNK):
        part = x[start : start + CHUNK]
        _order(ordered, part)
        for i in range(part.size):
            counts[ordered[i] >> 16] += 1


@Kernel
def _count(x, counts):
    size = (x.size + counts.shape[0] - 1) // counts.shape[0]
    for part in prange(counts.shape[0]):
        _note_buckets(x[part * size : min((part + 1) * size, x.size)], counts[part])


@inner
def _take_bucket(x, bucket, found, start):
    for i in range(x.size):
        bits = _ordered(x[i])
        if bits >> 16 == bucket:
            found[start] = bits
            start += 1


@Kernel
def _take(x, bucket, counts, found):
    size = (x.size + counts.shape[0] - 1) // counts.shape[0]
    for part in prange(counts.shape[0]):
        start = 0
        for before in range(part):
            start += counts[before, bucket]
        _take_bucket(x[part * size : min((part + 1) * size, x.size)], bucket, found, start)


@Kernel
def _finish(bits, shares, cut, found):
    for end in prange(2):
        found[end, 0] = _quantile(bits, 2 * end, shares[end], cut)


def _tensor(x: Any, places: Any, shares: Any, cut: bool, found: Any) -> None:
    counts = np.zeros((_PARTS, _BUCKETS), np.int32)
    _count(x.size, x, counts)
    total = counts.sum(0, dtype=np.int64)
    first, last = INFINITY >> 16, (INFINITY | SIGN) >> 16  # infinities and NaN are at both ends of the order
    if total[: _LOWER - last + 1].any() or total[first | 1 << 15 :].any():
        found[:] = np.nan
        return
    ends = np.cumsum(total)
    buckets = np.searchsorted(ends, places, side="right")
    bits = (buckets.astype(np.uint32)) << np.uint32(16)
    if cut:  # the low bits of the value are 0, so the ordered low bits of a negative one are all set
        bits[buckets < 1 << 15] |= np.uint32(_LOWER)
    else:
        for bucket in np.unique(buckets):
            inside = np.empty(total[bucket], np.uint32)
            _take(x.size, x, int(bucket), counts, inside)
            before = ends[bucket] - total[bucket]
            mine = buckets == bucket
            bits[mine] = np.partition(inside, places[mine] - before)[places[mine] - before]
    _finish(1, bits, shares, cut, found)


# ---- of each row ----------------------------------------------------------------------------------------------------


@inner
def _keep_largest(ordered, kept, flip):
    """Keep the largest values in `kept`, ascending; with all bits flipped, the smallest ones, flipped."""
    count = kept.size
    for i in range(count):
        kept[i] = 0
    least = np.uint32(0)
    for i in range(ordered.size):
        bits = ordered[i] ^ flip
        if bits > least:
            at = 1
            while at < count and kept[at] < bits:
                kept[at - 1] = kept[at]
                at += 1
            kept[at - 1] = bits
            least = kept[0]


@inner
def _row(x, places, shares, cut, ordered, kept, found, row):
    largest = np.uint32(0)
    for i in range(x.size):
        ordered[i] = _ordered(x[i])
    for i in range(x.size):
        largest = larger(largest, x[i])
    if largest >= INFINITY:
        found[0, row] = found[1, row] = np.nan
        return
    bits = np.empty(4, np.uint32)
    depth = min(places[1] + 1, x.size)
    if depth <= kept.size:
        lower = kept[:depth]
        _keep_largest(ordered, lower, np.uint32(0xFFFFFFFF))
        bits[0], bits[1] = ~lower[depth - 1 - places[0]], ~lower[depth - 1 - places[1]]
        depth = x.size - places[2]
        upper = kept[:depth]
        _keep_largest(ordered, upper, np.uint32(0))
        bits[2], bits[3] = upper[0], upper[places[3] - places[2]]
    else:
        ordered.sort()
        for i in range(4):
            bits[i] = ordered[places[i]]
    found[0, row] = _quantile(bits, 0, shares[0], cut)
    found[1, row] = _quantile(bits, 2, shares[1], cut)


@Kernel
def _rows(x, places, shares, cut, found):
    for part in prange((x.shape[0] + 15) // 16):
        ordered, kept = np.empty(x.shape[1], np.uint32), np.empty(_FEW + 2, np.uint32)
        for row in range(part * 16, min((part + 1) * 16, x.shape[0])):
            _row(x[row], places, shares, cut, ordered, kept, found, row)
