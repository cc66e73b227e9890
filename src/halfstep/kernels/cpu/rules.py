"""The scales of many tiles from their largest magnitudes, by any rule that kernels know: one schedule for all of them.

A rule travels as (rule, whole, up, steps), known by which of them are None:

- a power of two: `scales.power_scalars`, None, None, and for values `powers.scalars`, None for codes.
- the largest magnitude over the largest element: None, that element, None, None; in the dtype of what is stored.
- two levels: what `two_level.rule_of` says of them.
"""

import numpy as np
from numba import types

from halfstep.kernels.cpu.compiled import none, specialized_inlined
from halfstep.kernels.cpu.powers import note_scales
from halfstep.kernels.cpu.scales import absmax_scales, narrow_scales, power_scales
from halfstep.kernels.cpu.two_level import note_codes, tile_scales


@specialized_inlined
def steps_of(apart):
    """In kernels: the steps that `two_level.apart` says; None where it says none."""
    return (lambda apart: apart) if isinstance(apart, types.BaseTuple) else lambda apart: None


@specialized_inlined
def room(count, whole, stored):
    """In kernels: arrays for what elements of so many tiles are divided by, and for what stands beside that."""
    if none(whole):
        return lambda count, whole, stored: (np.empty(count, np.uint32), np.empty(count, np.uint32))
    if isinstance(whole, types.Float) and stored.dtype == types.float32:
        return lambda count, whole, stored: (stored, stored)
    return lambda count, whole, stored: (np.empty(count, np.float32), np.empty(count, np.float32))


@specialized_inlined
def note(largest, rule, whole, up, steps, coding, stored, divisor, beside):
    """In kernels: from largest magnitudes, as stored, what elements are divided by. Beside it: the shifts of powers of
    two, for values; of two levels the numbers of E4M3. What is kept of either goes to `stored`, unless that is None.

    Returns what `powers.note_scales` does, of powers of two for values; else 0.
    """

    def to_step(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        return note_scales(largest, rule, steps, divisor, beside)

    def powers(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        power_scales(largest, stored, divisor, rule)
        return np.uint32(0)

    def absmax(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        absmax_scales(stored, largest, whole)
        return np.uint32(0)

    def narrow(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        narrow_scales(largest, stored, divisor, whole)
        return np.uint32(0)

    def two_levels(largest, rule, whole, up, steps, coding, stored, divisor, beside):
        tile_scales(largest, divisor, beside, whole, rule, up)
        if coding is not None:
            note_codes(stored, beside, rule, coding)
        return np.uint32(0)

    if none(whole):
        return powers if none(steps) else to_step
    if isinstance(whole, types.Float):
        return absmax if stored.dtype == types.float32 else narrow
    return two_levels
