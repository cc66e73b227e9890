"""Where a number's place among 256 rising values is looked up: bins of numbers with one cut at the most."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep.formats import Codebook
from halfstep.kernels.cpu import element_codes


class Bins(NamedTuple):
    """A number's bin is its magnitude's bits, shifted to the right: the `most` of them from `first` on; those of
    negative numbers come after."""

    shift: int
    first: int
    most: int


@cache
def bins(format: Codebook) -> Bins | None:
    """How the numbers between its values are laid in bins; None where kernels do not read and write its codes."""
    values = format.values()
    rising = all(format.decode(code) == value for code, value in enumerate(values))
    found = _found(format) if len(values) == 256 and rising and format.ties == "lower" else None
    return None if found is None else found[0]


def table(format: Codebook, device: torch.device) -> Tensor:
    """What kernels look up, as int32: the values; and of every bin its cut and how many cuts lie below the bin."""
    found = _found(format)
    assert found is not None
    values = np.array(format.values(), np.float32).view(np.int32)
    return torch.from_numpy(np.concatenate([values, found[1].flatten()])).to(device)


_SHIFTS = range(18, 12, -1)
"""Bits of a significand that make no difference to bins: fewer and fewer, while some bin has two cuts."""


@cache
def _found(format: Codebook) -> tuple[Bins, np.ndarray] | None:
    cuts = np.array(element_codes.cut_points(format, with_values=False), np.float32)
    sizes = np.abs(cuts)[cuts != 0].view(np.uint32)
    for shift in _SHIFTS:
        first, last = (int(size) >> shift for size in (sizes.min(), sizes.max()))
        ends = np.arange(first, last + 2, dtype=np.uint32) << shift
        smallest, largest = ends[:-1].copy(), ends[1:] - 1
        smallest[0], largest[-1] = 0, np.float32(np.inf).view(np.uint32)
        # Of positive numbers from the smallest magnitude to the largest, of negative ones the other way.
        low = np.concatenate([smallest.view(np.float32), -largest.view(np.float32)])
        high = np.concatenate([largest.view(np.float32), -smallest.view(np.float32)])
        below, above = np.searchsorted(cuts, low), np.searchsorted(cuts, high)
        if (above - below).max() <= 1:
            cut = np.where(above > below, cuts[np.minimum(below, len(cuts) - 1)], np.float32(np.inf))
            rows = np.stack([cut.astype(np.float32).view(np.int32), below.astype(np.int32)], 1)
            return Bins(shift, first, len(smallest)), rows
    return None
