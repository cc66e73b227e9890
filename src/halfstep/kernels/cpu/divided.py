"""Divides elements of a block by the block's scale and rounds: to codes, or to values times the scale."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray

from halfstep.formats import Format
from halfstep.kernels.cpu import element_codes, elements
from halfstep.kernels.cpu.compiled import each, inner_inlined, inner_optimised, none, specialized
from halfstep.kernels.cpu.lanes import SIGN, Lane, bits_of, lanes, nearest_as, stored_as
from halfstep.kernels.cpu.noise import noise
from halfstep.kernels.cpu.rules import UNSCALED, Steps, nearest
from halfstep.kernels.cpu.runs import widest_registers
from halfstep.kernels.cpu.scales import quotient


# ---- codebooks of 8 bits in absmax blocks, such as the dynamic map of 8-bit optimizers -------------------------------
# A code is looked up by the upper 16 bits of the quotient, which leave at most two candidates, and by comparing its
# lower 16 bits with those of the cut point between them. One table entry holds both: adding the quotient's lower bits
# to it carries if the quotient is above the cut point.


Search = NDArray[np.uint32]
"""A table indexed by the upper 16 bits of a float32, in numerical order: (the number of cut points below all floats
with these bits) * 2^16, plus a value to which the lower 16 bits of a float above the next cut point carry."""


@cache
def search(format: Format) -> Search | None:
    """The table for a codebook. None where codes are not in the order of their values, or two cut points have the same
    upper 16 bits."""
    cuts = np.array(element_codes.cut_points(format, False), np.float32) + np.float32(0)  # -0 is +0
    places = np.searchsorted(cuts, _lowest(np.arange(1 << 16)), side="left")
    if (np.diff(places, append=len(cuts)) > 1).any() or any(
        format.decode(c) != v for c, v in enumerate(format.values())
    ):
        return None
    found = places.astype(np.uint32) << np.uint32(16)
    bits = cuts.view(np.uint32)
    ordered = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(SIGN))
    found[ordered >> 16] += 0xFFFF - (ordered & 0xFFFF)
    return found


def _lowest(keys: NDArray[Any]) -> NDArray[np.float32]:
    """The smallest float whose ordered bits begin with these 16."""
    above = keys >= 1 << 15
    upper = np.where(above, keys & 0x7FFF, keys ^ 0xFFFF).astype(np.uint32) << np.uint32(16)
    lowest = np.where(above, upper, upper | np.uint32(0xFFFF)).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(lowest), np.where(above, np.float32(np.inf), np.float32(-np.inf)), lowest)


@lanes(types.uint32)
def _ordered_quotient(value: Lane, scale: Lane) -> Lane:
    """The bits of value / scale, transformed so that they order like the values."""
    bits = quotient(bits_of(value), scale)
    return (bits < SIGN).pick(bits | SIGN, ~bits)


@lanes(types.uint16)
def _upper(bits: Lane) -> Lane:
    return (bits >> 16).to(16)


@lanes(types.uint32)
def _carried(entry: Lane, bits: Lane) -> Lane:
    """The entry plus the lower bits: its upper half is the code."""
    return entry + (bits & 0xFFFF)


@lanes(types.uint8)
def _place(carried: Lane) -> Lane:
    return (carried >> 16).to(8)


@inner_inlined
def encode_block(x, a, size, scale, bits, places, out, b):
    """Write the codes of a block of x, from a on, to out from b on. Three loops, through the buffer `bits`: in one loop
    LLVM would take vectors apart for every lookup and rebuild them, which takes twice as long."""
    for i in range(size):
        bits[i] = _ordered_quotient(x[a + i], scale)
    for i in range(size):
        bits[i] = _carried(places[_upper(bits[i])], bits[i])
    for i in range(size):
        out[b + i] = _place(bits[i])


# ---- elements --------------------------------------------------------------------------------------------------------


_FINITE = {types.uint32: float(torch.finfo(torch.float32).max), types.uint16: float(torch.finfo(torch.bfloat16).max)}


@lanes("like")
def rounded(value, divisor, scale, steps, numbers, codes, cuts, keys, index, like):
    """The code of value / divisor; or, where `like` is a float type, its value times the divisor.

    Args:
        divisor: for a power of two its bits; or, with `steps` and no `scale`, its shift (`rules.note_scales`).
        scale: the factor on the value, where that is not the divisor; `like` holds the product exactly.
    """
    if scale is None and steps is not None:
        return stored_as(nearest(bits_of(value), divisor, Steps(*steps)), like)
    over = quotient(bits_of(value), divisor)
    if like == types.uint8:
        return _code(over, numbers, codes, cuts, keys, index)
    if cuts is not None:
        number = element_codes.looked_up(over.float(), cuts)
    elif steps is not None:
        number = nearest(over, UNSCALED, Steps(*steps)).float()
    else:
        number = elements.rounded(over, elements.Rounding(*numbers), noise(keys, index)).float()
    if scale is not None:
        return stored_as((number * scale).bits(), like)
    own = divisor.float() if divisor.stored == types.uint32 else divisor
    return nearest_as(scaled(number, own, like), like)


def _code(over: Lane, numbers: Any, codes: Any, cuts: Any, keys: Any, index: Lane) -> Lane:
    """The code of a quotient's bits."""
    if cuts is not None:
        return element_codes.searched(over.float(), cuts, codes)
    p, c = elements.Rounding(*numbers), element_codes.Coding(*codes)
    if keys is None and p.add is None and c.complement is None:
        return element_codes.encoded_number(over, p, c).to(8)
    return element_codes.encoded(over, p, c, noise(keys, index)).to(8)


def scaled(rounded: Lane, scale: Lane, like: Any) -> Lane:
    """rounded * scale clamped to the type's finite range; 0 where the scale is 0, whatever the codes are."""
    product = rounded * scale
    limit = _FINITE[like]
    product = (product > limit).pick(product.constant(limit), product)
    product = (product < -limit).pick(product.constant(-limit), product)
    return scale.equals(0.0).pick(product.constant(0.0), product)


def _over(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
    block = 1 << len(levels)  # a compile-time constant: a loop of fixed length vectorises
    for b in range(divisor.size):
        d, s = divisor[b], each(scale, b)
        start = b * block
        for i in range(block):
            j = start + i
            out[j] = rounded(x[j], d, s, steps, numbers, codes, cuts, keys, j, out[j])


_blocks = inner_optimised(_over)


def _places(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
    widest_registers()
    block = 1 << len(levels)
    bits = np.empty(block, np.uint32)
    for b in range(divisor.size):
        encode_block(x, b * block, block, divisor[b], bits, cuts, out, b * block)


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


def _rows(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
    for b in range(divisor.size):
        row, to, d, s = x[b * run : (b + 1) * run], out[b * run : (b + 1) * run], divisor[b], each(scale, b)
        for i in range(row.size):
            to[i] = rounded(row[i], d, s, steps, numbers, codes, cuts, keys, b * run + i, to[i])


@specialized
def divided(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
    """In kernels: `rounded` for every element of some tiles of a row, each with its tile's constants.

    Args:
        run, levels: a tile's length, and its `blocks.levels`, or None where it has none.
        cuts: of codebooks, the cut points; for 8 bits, the table of `search`.
        keys: `noise.keys_at` the first element; or `column_keys`.
        place: None; or, for columns written `tall` elements apart from `to` on, (to, tall, their size).
    """

    def blocks(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place):
        _blocks(x, divisor, scale, steps, run, levels, out, numbers, codes, cuts, keys, place)

    if isinstance(cuts, types.Array):
        return _places
    if isinstance(place, types.BaseTuple):
        return _columns
    return _rows if none(levels) else _over if none(scale) and not none(steps) else blocks
