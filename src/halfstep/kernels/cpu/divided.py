"""An element of a block over the block's scale, rounded: its code, or its value times the scale."""

from __future__ import annotations

from typing import Any

import torch
from numba import types

from halfstep.kernels.cpu import element_codes, elements
from halfstep.kernels.cpu.compiled import inner_optimised
from halfstep.kernels.cpu.element_codes import Coding, looked_up, searched
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import INFINITY, Lane, bits_of, lanes, nearest_as, stored_as
from halfstep.kernels.cpu.noise import noise
from halfstep.kernels.cpu.powers import UNSCALED, Steps, nearest


_FINITE = {types.uint32: float(torch.finfo(torch.float32).max), types.uint16: float(torch.finfo(torch.bfloat16).max)}


def quotient(bits: Lane, scale: Lane) -> Lane:
    """The bits of x / scale; +0 where the scale says that its block is lost, or zero."""
    if scale.stored == types.uint32:  # a power of two, given as bits: multiplying by its inverse is exact
        top = scale.constant(254 << 23)
        inverse = (scale < 1 << 23).pick(top, top - scale)  # of 2^-127, a subnormal number, and of the others
        inverse = inverse.equals(0).pick(scale.constant(1 << 22), inverse)
        return (scale > INFINITY).pick(scale.constant(0), (bits.float() * inverse.float()).bits())
    return (scale > 0.0).pick((bits.float() / scale).bits(), 0)


@lanes("like")
def element_apart(value, divisor, scale, numbers, steps, cuts, keys, index, like):
    """value / divisor, rounded, times a scale that is not the divisor; a product that `like` holds exactly."""
    over = quotient(bits_of(value), divisor)
    if cuts is not None:
        rounded = looked_up(over.float(), cuts)
    elif steps is not None:
        rounded = nearest(over, UNSCALED, Steps(*steps)).float()
    else:
        rounded = elements.rounded(over, Rounding(*numbers), noise(keys, index)).float()
    return stored_as((rounded * scale).bits(), like)


@lanes("like")
def element(value, scale, numbers, codes, cuts, keys, index, like):
    """The code of value / scale; its value times the scale, where `like` is a tensor of values."""
    over = quotient(bits_of(value), scale)
    if like == types.uint8:
        if cuts is not None:
            return searched(over.float(), cuts, codes)
        p, c = Rounding(*numbers), Coding(*codes)
        if keys is None and p.add is None and c.complement is None:
            return element_codes.encoded_number(over, p, c).to(8)
        return element_codes.encoded(over, p, c, noise(keys, index)).to(8)
    if cuts is not None:
        rounded = looked_up(over.float(), cuts)
    else:
        rounded = elements.rounded(over, Rounding(*numbers), noise(keys, index)).float()
    return nearest_as(scaled(rounded, scale.float() if scale.stored == types.uint32 else scale, like), like)


def scaled(rounded: Lane, scale: Lane, like: Any) -> Lane:
    """The product within the range of the type; 0 in a block of zeros, whatever its codes mean."""
    product = rounded * scale
    limit = _FINITE[like]
    product = (product > limit).pick(product.constant(limit), product)
    product = (product < -limit).pick(product.constant(-limit), product)
    return scale.equals(0.0).pick(product.constant(0.0), product)


@inner_optimised
def divided(x, scale, levels, out, numbers, codes, cuts, keys):
    """Every element of some blocks, each with its scale."""
    block = 1 << len(levels)  # known when this is compiled: a loop of fixed length vectorises
    for b in range(scale.size):
        s = scale[b]
        start = b * block
        for i in range(block):
            j = start + i
            out[j] = element(x[j], s, numbers, codes, cuts, keys, j, out[j])


@inner_optimised
def divided_apart(x, divisor, scale, levels, out, numbers, steps, cuts, keys):
    """Every element of some blocks, each with what it is divided by and what it is multiplied by, to values."""
    block = 1 << len(levels)
    for b in range(scale.size):
        d = divisor[b]
        s = scale[b]
        start = b * block
        for i in range(block):
            j = start + i
            out[j] = element_apart(x[j], d, s, numbers, steps, cuts, keys, j, out[j])
