"""Whether values that were not 16-bit ones by nature were rounded to 16 bits: frequencies and tables, not counters."""

from __future__ import annotations

from halfstep import formats
from halfstep.bits.evidence import CHOSEN
from halfstep.bits.origin import origin
from halfstep.bits.scan import Scan
from halfstep.formats import Float


_TYPES = {"bfloat16": "bf16", "float16": "fp16"}
_MULTIPLES = 16
"""Of a table with a fixed step the smallest value is a few of its steps; of rounded values it has all the bits."""


def narrowed(scan: Scan, stored: str) -> str | None:
    """The 16-bit type that a tensor's values were rounded to: the one that it is stored in, or, of float32, the one
    that every value fits. None where they may have been exact in it: counters, powers of two, the ends of a mask, few
    values, those of fewer bits, and multiples of one step (k / 128, slopes of powers of two times positions).
    """
    name = _TYPES.get(stored)
    if stored == "float32":
        said = origin(scan, stored)
        name = said.through[0] if said.key in ("bf16", "fp16", "bf16+fp16", "fp16+bf16") else None
    if name is None or scan.magnitudes <= CHOSEN:
        return None
    format, step = formats.get(name, Float), 2.0**scan.table.last_bit
    all_bits = scan.table.significant_bits == format.significant_bits
    subnormal = scan.smallest < 2.0**format.min_exponent  # whose steps are the format's, not a table's
    stepped = scan.amax <= step * 2**format.significant_bits or (not subnormal and scan.smallest < _MULTIPLES * step)
    return name if all_bits and not stepped else None
