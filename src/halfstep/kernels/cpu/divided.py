"""An element of a block over the block's scale, rounded: its code, or its value times the scale."""

from typing import Any

import numpy as np
import torch
from numba import types

from halfstep.kernels.cpu import element_codes, elements
from halfstep.kernels.cpu.codebook import encode_piece
from halfstep.kernels.cpu.compiled import each, inner, inner_optimised, none, specialized_inlined
from halfstep.kernels.cpu.element_codes import Coding, looked_up, searched
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import Lane, bits_of, lanes, nearest_as, stored_as
from halfstep.kernels.cpu.noise import noise
from halfstep.kernels.cpu.powers import UNSCALED, Steps, nearest
from halfstep.kernels.cpu.scales import quotient


_FINITE = {types.uint32: float(torch.finfo(torch.float32).max), types.uint16: float(torch.finfo(torch.bfloat16).max)}


@lanes("like")
def rounded(value, divisor, scale, steps, numbers, codes, cuts, keys, index, like):
    """The code of value / divisor; its value times the divisor, where `like` is a tensor of values.

    Args:
        divisor: of a power of two the bits; or, with `steps` and no `scale`, its shift (`powers.note_scales`).
        scale: what the value is multiplied by, where that is not the divisor: `like` holds the product exactly.
    """
    if scale is None and steps is not None:
        return stored_as(nearest(bits_of(value), divisor, Steps(*steps)), like)
    over = quotient(bits_of(value), divisor)
    if like == types.uint8:
        return _code(over, numbers, codes, cuts, keys, index)
    if cuts is not None:
        number = looked_up(over.float(), cuts)
    elif steps is not None:
        number = nearest(over, UNSCALED, Steps(*steps)).float()
    else:
        number = elements.rounded(over, Rounding(*numbers), noise(keys, index)).float()
    if scale is not None:
        return stored_as((number * scale).bits(), like)
    own = divisor.float() if divisor.stored == types.uint32 else divisor
    return nearest_as(scaled(number, own, like), like)


def _code(over: Lane, numbers: Any, codes: Any, cuts: Any, keys: Any, index: Lane) -> Lane:
    """The code of a quotient's bits."""
    if cuts is not None:
        return searched(over.float(), cuts, codes)
    p, c = Rounding(*numbers), Coding(*codes)
    if keys is None and p.add is None and c.complement is None:
        return element_codes.encoded_number(over, p, c).to(8)
    return element_codes.encoded(over, p, c, noise(keys, index)).to(8)


def scaled(rounded: Lane, scale: Lane, like: Any) -> Lane:
    """The product within the range of the type; 0 in a block of zeros, whatever its codes mean."""
    product = rounded * scale
    limit = _FINITE[like]
    product = (product > limit).pick(product.constant(limit), product)
    product = (product < -limit).pick(product.constant(-limit), product)
    return scale.equals(0.0).pick(product.constant(0.0), product)


def _over(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
    block = 1 << len(levels)  # known when this is compiled: a loop of fixed length vectorises
    for b in range(divisor.size):
        d, s = divisor[b], each(scale, b)
        start = b * block
        for i in range(block):
            j = start + i
            out[j] = rounded(x[j], d, s, steps, numbers, codes, cuts, keys, j, out[j])


_blocks, _blocks_in_steps = inner_optimised(_over), inner(_over)


@inner
def _columns(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
    to, tall, size = place
    block, tiles = 1 << len(levels), size >> len(levels)
    for c in range(divisor.size // tiles):
        own = each(keys, c)
        for t in range(tiles):
            d, s, start = divisor[c * tiles + t], each(scale, c * tiles + t), np.uintp(c * size + t * block)
            first, index = np.uintp(to + c * tall + t * block), np.uintp(t * block)
            for i in range(np.uintp(block)):
                j = first + i
                out[j] = rounded(x[start + i], d, s, steps, numbers, codes, cuts, own, index + i, out[j])


@inner
def _rows(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
    for b in range(divisor.size):
        row, to, d, s = x[b * run : (b + 1) * run], out[b * run : (b + 1) * run], divisor[b], each(scale, b)
        for i in range(row.size):
            to[i] = rounded(row[i], d, s, steps, numbers, codes, cuts, keys, b * run + i, to[i])


@specialized_inlined
def divided(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
    """In kernels: every element of some tiles of a row, each with its numbers: as `rounded`.

    Args:
        run, levels: a tile's length, and `blocks.levels` of it where that is a power of two that has some; or None.
        cuts: of codebooks; of those with 8 bits what `codebook.search` has.
        keys: `noise.keys_at` the first element; or `column_keys`.
        place: of columns that are written `tall` elements apart, from `to` on: (to, tall, their size). Or None.
    """

    def places(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
        encode_piece(x, divisor, levels, out, cuts)

    def blocks(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
        _blocks(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place)

    def in_steps(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
        _blocks_in_steps(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place)

    def columns(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
        _columns(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place)

    def rows(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
        _rows(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place)

    if isinstance(cuts, types.Array):
        return places
    if isinstance(place, types.BaseTuple):
        return columns
    return rows if none(levels) else in_steps if none(scale) and not none(steps) else blocks
