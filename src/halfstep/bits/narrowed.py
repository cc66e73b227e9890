"""Whether values that were not 16-bit ones by nature were rounded to 16 bits: frequencies and tables, not counters."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep import formats
from halfstep.bits.evidence import CHOSEN
from halfstep.bits.origin import origin
from halfstep.bits.scan import Scan
from halfstep.formats import Float


_TYPES = {"bfloat16": "bf16", "float16": "fp16"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
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


def progression(tensor: Tensor) -> str | None:
    """The 16-bit type that positions, or other numbers at equal steps along one of the last two dimensions, were
    rounded to: the tensor is in that type or in float32, and rounding equal steps gives it where they themselves do
    not. Its bits do not show it, since whole numbers have few.

    >>> progression(torch.arange(1024, dtype=torch.float32, device="cpu").bfloat16()), progression(torch.ones(9, 9))
    ('bf16', None)
    """
    names = [n for n, dtype in _DTYPES.items() if tensor.dtype in (dtype, torch.float32)]
    for values in (tensor, tensor.mT) if tensor.dim() > 1 else (tensor,) if tensor.dim() else ():
        if values.shape[-1] <= CHOSEN:
            continue
        found = values.detach().double()
        count = torch.arange(found.shape[-1], dtype=torch.float64, device=found.device)
        steps = found[..., :1] + (found[..., 1:2] - found[..., :1]) * count
        if not torch.equal(steps, found):
            return next((n for n in names if torch.equal(steps.to(_DTYPES[n]).double(), found)), None)
    return None
