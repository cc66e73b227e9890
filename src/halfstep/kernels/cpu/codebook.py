"""Codebooks of 8 bits in absmax blocks, such as the dynamic map of 8-bit optimizers: `quant.Quantizer`, bit for bit.

A code is found by the upper 16 bits of its quotient, which leave at most two neighbours, and by the lower 16 bits of
the cut between them. One entry of a table has both: adding the quotient's own lower bits to it carries above the cut.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from halfstep.formats import Format
from halfstep.kernels.cpu.compiled import inner, inner_inlined
from halfstep.kernels.cpu.element_codes import cut_points
from halfstep.kernels.cpu.lanes import SIGN, Lane, bits_of, lanes
from halfstep.kernels.cpu.runs import widest_registers
from halfstep.kernels.cpu.scales import quotient


Search = NDArray[np.uint32]
"""By the upper 16 bits of a number, in the order of numbers: how many cuts are below all that have them, times 2^16,
and what carries when a number above the next cut adds its lower half."""


@cache
def search(format: Format) -> Search | None:
    """None where codes are not in the order of their values, or two cuts lie so near that the upper 16 bits of a number
    do not tell them apart."""
    cuts, values = np.array(cut_points(format, False), np.float32) + np.float32(0), format.values()  # -0 is +0
    places = np.searchsorted(cuts, _lowest(np.arange(1 << 16)), side="left")
    if (np.diff(places, append=len(cuts)) > 1).any() or any(format.decode(c) != v for c, v in enumerate(values)):
        return None
    found = places.astype(np.uint32) << np.uint32(16)
    bits = cuts.view(np.uint32)
    ordered = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(SIGN))
    found[ordered >> 16] += 0xFFFF - (ordered & 0xFFFF)
    return found


def _lowest(keys: NDArray[Any]) -> NDArray[np.float32]:
    """The smallest number whose ordered bits begin so."""
    above = keys >= 1 << 15
    upper = np.where(above, keys & 0x7FFF, keys ^ 0xFFFF).astype(np.uint32) << np.uint32(16)
    lowest = np.where(above, upper, upper | np.uint32(0xFFFF)).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(lowest), np.where(above, np.float32(np.inf), np.float32(-np.inf)), lowest)


# ---- a chunk -------------------------------------------------------------------------------------------------------


@lanes(types.uint32)
def _ordered_quotient(value: Lane, scale: Lane) -> Lane:
    """The bits of value / scale, so that larger numbers have larger ones."""
    bits = quotient(bits_of(value), scale)
    return (bits < SIGN).pick(bits | SIGN, ~bits)


@lanes(types.uint16)
def _upper(bits: Lane) -> Lane:
    return (bits >> 16).to(16)


@lanes(types.uint32)
def _carried(entry: Lane, bits: Lane) -> Lane:
    """In the upper half the place of an entry, or the next one for a number above its cut."""
    return entry + (bits & 0xFFFF)


@lanes(types.uint8)
def _place(carried: Lane) -> Lane:
    return (carried >> 16).to(8)


@inner_inlined
def encode_block(x, a, size, scale, bits, places, out, b):
    """A block of x, from a on, to the codes from b on. In three loops, by way of `bits`: of one, LLVM would take apart
    the registers for every look-up and put them together again, which is twice the time."""
    for i in range(size):
        bits[i] = _ordered_quotient(x[a + i], scale)
    for i in range(size):
        bits[i] = _carried(places[_upper(bits[i])], bits[i])
    for i in range(size):
        out[b + i] = _place(bits[i])


@inner
def encode_piece(x, scale, levels, out, places):
    """Every element of some blocks, each with its scale."""
    widest_registers()
    block = 1 << len(levels)  # known when this is compiled: a loop of fixed length vectorises
    bits = np.empty(block, np.uint32)
    for b in range(scale.size):
        encode_block(x, b * block, block, scale[b], bits, places, out, b * block)
