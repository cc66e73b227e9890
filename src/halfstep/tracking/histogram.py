"""Histograms of binary exponents: where the values of tensors lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep.bits.histogram import ExponentHistogram


_LOWEST, _HIGHEST = -149, 128  # floor(log2 |x|) of float32's values; infinities and NaN are counted apart


def exponents(tensors: Iterable[Tensor]) -> ExponentHistogram:
    """The histogram over all values of some tensors, of any floating dtype."""
    bins = torch.zeros(_HIGHEST - _LOWEST + 1, dtype=torch.int64, device="cpu")
    zeros = nonfinite = 0
    for tensor in tensors:
        flat = tensor.detach().float().reshape(-1)
        stored = flat.view(torch.int32) >> 23 & 255  # of a normal number, its exponent + 127
        found = torch.bincount(stored, minlength=256).cpu()
        bins[-126 - _LOWEST : 128 - _LOWEST] += found[1:255]
        nonfinite += int(found[255])
        if found[0]:
            small = flat[stored == 0]
            subnormal = small[small != 0]
            zeros += len(small) - len(subnormal)
            _, exponent = torch.frexp(subnormal)  # |x| = f * 2^exponent with f in [1/2, 1): the floor is one less
            bins += torch.bincount(exponent.long() - 1 - _LOWEST, minlength=len(bins)).cpu()
    filled = torch.nonzero(bins).reshape(-1).tolist()
    return ExponentHistogram({i + _LOWEST: int(bins[i]) for i in filled}, zeros, nonfinite)
