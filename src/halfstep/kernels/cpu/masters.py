"""Resynchronise what is kept beside a weight that was written to: one pass, in place, reading where it can.

The conditions are those of `quant.masters`, which says why they never touch what an update wrote itself.
"""

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, ends, inner
from halfstep.kernels.cpu.lanes import Lane, bits_of, rounded_up_half
from halfstep.kernels.cpu.runs import elementwise, reduction


KEPT = {
    "none": None, "fp32": "master", "split": "low", "kahan": "compensation", "collage": "residual",
    "residue": "residue",
}  # fmt: skip
"""What a master of that name keeps."""

PLAIN = {
    torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16,
    torch.int16: torch.uint16, torch.int8: torch.uint8,  # the lower bits of split weights
}  # fmt: skip
"""The numpy type in which a tensor's dtype travels."""


def run(weight: Tensor, master: str, kept: Mapping[str, Tensor]) -> bool:
    """Make what is kept the weight's own where it cannot be what an update left beside it. False where that is not done
    here: it takes dense contiguous CPU tensors, kept by a master of `KEPT`."""
    if KEPT.get(master) not in kept or not plain(weight, torch.bfloat16, torch.float16):
        return False
    if not all(plain(t, torch.float32, torch.bfloat16, torch.int16, torch.int8) for t in kept.values()):
        return False
    low, rest = kept.get("low", kept.get("residue")), kept.get("compensation", kept.get("residual"))
    beside = [None if tensor is None else _array(tensor) for tensor in (kept.get("master"), low, rest)]
    _follow(weight.numel(), _array(weight), *beside)
    return True


def _array(tensor: Tensor) -> Any:
    return array(tensor, PLAIN[tensor.dtype])


# ---- lanes -----------------------------------------------------------------------------------------------------


def _magnitude(value: Lane) -> Lane:
    return value & 0x7FFF


@reduction
def _strange_rest(found, weight, rest):
    """`found`, with a bit set where 2^7 |rest| may be more than |weight|, by the exponents: a first look."""
    limit = _magnitude(weight).max(0x3C0) - 0x380
    return found | (_magnitude(rest) > limit).to(16)


def followed_rest(weight: Lane, rest: Lane) -> Lane:
    """`quant.masters.base.drop_strange`, of bfloat16 bits."""
    limit = _magnitude(weight).max(0x3C0) - 0x380
    return (_magnitude(rest) <= limit).pick(rest, 0)


def followed_master(weight: Lane, master: Lane) -> Lane:
    """The master, where the weight is its rounded image; else the weight."""
    return _is_image(weight, master).pick(master, bits_of(weight).float())


@elementwise
def _keep_rest(out, weight):
    return followed_rest(weight, out)


@elementwise
def _keep_image(out, weight):
    return followed_master(weight, out)


@reduction
def _strange_image(found, weight, master):
    """`found`, with a bit set where the weight is not the master's rounded image."""
    return found | (~_is_image(weight, master)).to(16)


def _is_image(weight: Lane, master: Lane) -> Lane:
    image = master.float_to_half() if weight.stored == types.int16 else (rounded_up_half(master.bits()) >> 16).to(16)
    return ~master.is_nan() & image.equals(weight)


@reduction
def _strange_half(found, weight, low):
    """`found`, with a bit set where the upper half and the lower bits are together NaN, or about to be."""
    return found | _joins_to_nan(weight, low).to(16)


@elementwise
def _keep_half(out, weight):
    """The lower bits, or 0 where they make a NaN."""
    return _joins_to_nan(weight, out).pick(out.constant(0), out)


def joined(weight: Lane, low: Lane) -> Lane:
    """The float32 of an upper half and the signed bits that follow it: 16, or 8."""
    return ((weight.to(32) << 16) + (low.to(32) << 32 - low.type.width).shift_signed(16)).float()


def _joins_to_nan(weight: Lane, low: Lane) -> Lane:
    return joined(weight, low).is_nan()


# ---- chunks ----------------------------------------------------------------------------------------------------


@inner
def _follow_rest(weight, rest):
    if _strange_rest(np.uint16(0), weight, rest):
        _keep_rest(rest, weight)


@inner
def _follow_image(weight, master):
    if _strange_image(np.uint16(0), weight, master):
        _keep_image(master, weight)


@inner
def _follow_half(weight, low):
    if _strange_half(np.uint16(0), weight, low):
        _keep_half(low, weight)


@Kernel
def _follow(weight, master, low, rest):
    for chunk in numba.prange((weight.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, weight.size)
        if master is not None:
            _follow_image(weight[a:b], master[a:b])
        if low is not None:
            _follow_half(weight[a:b], low[a:b])
        if rest is not None:
            _follow_rest(weight[a:b], rest[a:b])
