"""Two levels of scales: a number of E4M3 for each tile, and a float32 number for the tensor, which is read first."""

from functools import cache
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.formats import Format, ocp
from halfstep.kernels.cpu import amax, element_codes, elements, powers
from halfstep.kernels.cpu.compiled import inner
from halfstep.kernels.cpu.element_codes import Coding
from halfstep.kernels.cpu.elements import Rounding, Scalars
from halfstep.kernels.cpu.lanes import INFINITY, NAN, bits_of
from halfstep.kernels.cpu.runs import elementwise
from halfstep.quant.quantizer import as_rows
from halfstep.quant.rounding import Seed
from halfstep.quant.scales import Scales
from halfstep.quant.scaling.base import finite
from halfstep.quant.scaling.two_level import TwoLevel


E4M3_BITS = 4  # significant ones


@cache
def scalars() -> tuple[Scalars, Scalars]:
    """What `tile_scales` and `note_codes` need of E4M3."""
    return element_codes.scalars(ocp.float8_e4m3fn, "nearest_even", "saturate")


def rule_of(x: Tensor, format: Format, scales: Scales, tensor_scale: Tensor | None) -> Any:
    """What `rules` takes of a tensor that is empty or one that `amax` reads: E4M3's numbers; the format's largest value
    and the tensor's scale, which is also written to `tensor_scale`; and whether scales go up."""
    rule = scales.rule
    assert isinstance(rule, TwoLevel)
    largest = amax.run(x)
    if largest is None:  # x is empty
        largest = torch.zeros((), dtype=torch.float32, device="cpu")
    known = largest.item()
    if rule.clips and isfinite(known):  # the rule's own formula, without torch, which takes longer than a row of x
        scale = tensor_scale_of(known, format)
    else:
        if not isfinite(known):  # the largest of the tiles that are
            largest = finite(scales.tile.reduce(as_rows(x).float().abs(), "amax"))
        scale = np.float32(rule.tensor_scale(largest, format))
    if tensor_scale is not None:
        tensor_scale.fill_(float(scale))
    return given(format, rule, scale)


def tensor_scale_of(amax: float, format: Format) -> np.float32:
    """The tensor's scale from its largest magnitude, which is finite, by a rule that `clips`."""
    return np.float32(np.float32(amax) / np.float32(ocp.float8_e4m3fn.max * format.max) or 1)


def given(format: Format, rule: TwoLevel, scale: Tensor | np.float32) -> Any:
    """The same for a tensor whose scale is known."""
    return scalars()[0], (np.float32(format.max), np.float32(scale)), np.uint32(not rule.clips), None


def apart(format: Format, seed: Seed | None, dtype: torch.dtype, leaves: bool) -> Any:
    """Where values, in that dtype, leave out the tensor's scale the `Steps` that they are rounded in, or 0 where they
    are not rounded so; None where they have it."""
    if not leaves:
        return None
    assert dtype == torch.float32 or format.significant_bits + E4M3_BITS <= 8  # it holds the products exactly
    return (powers.unscaled(format) if seed is None else None) or np.uint32(0)


# ---- lanes ---------------------------------------------------------------------------------------------------------


@elementwise
def _tile_scale(amax, largest, tensor_scale, numbers, up):
    """amax / largest / tensor_scale as a number of E4M3; unless `up` is 0 the next one, where amax is still beyond."""
    p, amax = Rounding(*numbers), bits_of(amax)
    known = (amax >= INFINITY).pick(amax.constant(NAN), amax).float()
    scale = elements.rounded((known / largest / tensor_scale).bits(), p)
    step = ((scale & INFINITY).max(p.min_normal) - (E4M3_BITS - 1 << 23)).float()
    clipped = (up > 0) & ((known / (scale.float() * tensor_scale)) > largest)
    return clipped.pick(scale.float() + step, scale.float())


@elementwise
def note_codes(scale, numbers, codes):
    """In kernels: the codes of numbers of E4M3."""
    return element_codes.encoded(scale.bits(), Rounding(*numbers), Coding(*codes)).to(8)


@elementwise
def _times(one, other):
    return one * other


# ---- the scales of many tiles ----


@inner
def tile_scales(amax, divisor, scale, whole, numbers, up):
    """Of tiles with these maxima: their numbers of E4M3, and these times the tensor's scale."""
    _tile_scale(scale, amax, whole[0], whole[1], numbers, up)
    _times(divisor, scale, whole[1])
