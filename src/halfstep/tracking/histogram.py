"""Histograms of binary exponents: where values lie, and what a format would make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import Float


_LOWEST, _HIGHEST = -149, 128  # floor(log2 |x|) of float32's values; infinities and NaN are counted apart


@dataclass(frozen=True)
class ExponentHistogram:
    """How many values have each exponent floor(log2 |x|), and how many are zero or not finite."""

    counts: Mapping[int, int]
    zeros: int = 0
    nonfinite: int = 0

    def share_zeroed(self, format: Float, scale: float = 1.0) -> float:
        """The share of the non-zero values that a cast to `format` makes zero after multiplying by `scale`.

        Read off the bins: a value becomes zero at half the smallest subnormal and below, so a bin does when it lies
        under that (its one value on the tie is the error made). `scale` is a power of two.
        """
        total = sum(self.counts.values())
        limit = format.min_exponent - format.mantissa_bits - 1 - _log2(scale)
        return sum(n for exponent, n in self.counts.items() if exponent < limit) / total if total else 0.0

    def share_subnormal(self, format: Float, scale: float = 1.0) -> float:
        """The share of the non-zero values that become subnormal in `format`, after multiplying by `scale`."""
        total = sum(self.counts.values())
        high = format.min_exponent - _log2(scale)
        low = high - format.mantissa_bits - 1
        return sum(n for exponent, n in self.counts.items() if low <= exponent < high) / total if total else 0.0

    def as_data(self) -> dict[str, Any]:
        """For JSON: exponents as keys, ascending."""
        return {
            "counts": {str(e): n for e, n in sorted(self.counts.items())},
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
        }


def exponents(tensors: Iterable[Tensor]) -> ExponentHistogram:
    """The histogram over all values of some tensors, of any floating dtype."""
    bins = torch.zeros(_HIGHEST - _LOWEST + 1, dtype=torch.int64)
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


def _log2(scale: float) -> int:
    mantissa, exponent = torch.frexp(torch.tensor(scale, dtype=torch.float64))
    if float(mantissa) != 0.5:
        raise ValueError(f"scale {scale} given; expected a power of two")
    return int(exponent) - 1
