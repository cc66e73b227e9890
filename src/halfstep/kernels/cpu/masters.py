"""Resynchronises a master with a weight that was written from outside: one pass, in place, writing only if needed.

The conditions are those of `quant.masters`, which explains why they never change what an update wrote.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numba import prange, types
from torch import Tensor

from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, ends, inner
from halfstep.kernels.cpu.lanes import Lane, bits_of, rounded_up_half
from halfstep.kernels.cpu.runs import elementwise, reduction


KEPT = {
    "none": None, "fp32": "master", "split": "low", "kahan": "compensation", "collage": "residual",
    "residue": "residue",
}  # fmt: skip
"""The name of the tensor that each kind of master keeps."""

PLAIN = {
    torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16,
    torch.int16: torch.uint16, torch.int8: torch.uint8,  # the lower bits of split weights
}  # fmt: skip
"""The dtype in which a tensor is passed as a numpy array."""


def run(weight: Tensor, master: str, kept: Mapping[str, Tensor]) -> bool:
    """Replace the master's values where they cannot be what an update left beside this weight. False where no kernel
    supports it: all must be dense contiguous CPU tensors, with a master in `KEPT`."""
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


# ---- the conditions, and the replacements ----------------------------------------------------------------------


def _is_rest(weight: Lane, rest: Lane) -> Lane:
    """Whether 2^7 |rest| <= |weight|, by the bits."""
    return (rest & 0x7FFF) <= (weight & 0x7FFF).max(0x3C0) - 0x380


def followed_rest(weight: Lane, rest: Lane) -> Lane:
    """`quant.masters.base.drop_impossible` on bfloat16 bits."""
    return _is_rest(weight, rest).pick(rest, 0)


def _has_image(weight: Lane, master: Lane) -> Lane:
    """Whether the weight is the master, rounded."""
    image = master.float_to_half() if weight.stored == types.int16 else (rounded_up_half(master.bits()) >> 16).to(16)
    return ~master.is_nan() & image.equals(weight)


def followed_master(weight: Lane, master: Lane) -> Lane:
    """The master where the weight is the master, rounded; else the weight."""
    return _has_image(weight, master).pick(master, bits_of(weight).float())


def joined(weight: Lane, low: Lane) -> Lane:
    """The float32 of an upper half plus the signed lower bits: 16 of them, or 8."""
    return ((weight.to(32) << 16) + (low.to(32) << 32 - low.type.width).shift_signed(16)).float()


def _is_half(weight: Lane, low: Lane) -> Lane:
    """Whether the upper half plus the lower bits is not NaN."""
    return ~joined(weight, low).is_nan()


def _following(stands: Callable[[Lane, Lane], Lane], followed: Callable[[Lane, Lane], Lane]) -> Any:
    """A loop that first checks, and writes only if some element fails the condition `stands`."""
    strange = reduction(lambda found, weight, kept: found | (~stands(weight, kept)).to(16))
    write = elementwise(lambda out, weight: followed(weight, out))

    @inner
    def follow(weight, kept):
        if strange(np.uint16(0), weight, kept):
            write(kept, weight)

    return follow


_follow_rest, _follow_image = _following(_is_rest, followed_rest), _following(_has_image, followed_master)
_follow_half = _following(_is_half, lambda weight, low: _is_half(weight, low).pick(low, 0))


@Kernel
def _follow(weight, master, low, rest):
    for chunk in prange((weight.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, weight.size)
        if master is not None:
            _follow_image(weight[a:b], master[a:b])
        if low is not None:
            _follow_half(weight[a:b], low[a:b])
        if rest is not None:
            _follow_rest(weight[a:b], rest[a:b])
