"""Formats that are listed value by value (codebooks, bare exponents): rounding is a search among the boundaries."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.quant.rounding import stochastic


def rounded(x: Tensor, format: Format, rounding: str, overflow: str, noise: Tensor | None) -> Tensor:
    """The neighbour of x that the rounding chooses; beyond the ends, the ends (see `Format.overflow_from`)."""
    values, boundaries, even = (t.to(x.device) for t in _lists(format))
    inside = x.nan_to_num(0.0).clamp(format.min, format.max)
    index = (torch.searchsorted(values, inside, right=True) - 1).clamp(0, len(values) - 2)
    low, high, turn = values[index], values[index + 1], boundaries[index]
    if noise is not None:
        rises = stochastic((inside - low) / (high - low), noise) == 1
    elif rounding == "nearest_even":
        tie = (
            even[index + 1]
            if format.ties == "even"
            else torch.tensor(format.ties == "upper", device=x.device, dtype=torch.bool)
        )
        rises = (inside > turn) | ((inside == turn) & tie)
    elif rounding == "nearest_away":
        rises = (inside > turn) | ((inside == turn) & (high.abs() >= low.abs()))
    elif rounding == "nearest_up":
        rises = inside >= turn
    elif rounding == "toward_zero":
        rises = torch.where(inside < 0, inside != low, inside == high)
    else:
        rises = inside > low if rounding == "up" else inside == high
    result = torch.where(rises, high, low)
    lost = x.isnan() if format.min <= 0 else x.isnan() | (x <= 0)
    if overflow == "ieee" and format.has_nan:
        inward = rounding in ("toward_zero", "down")
        lost = lost | (x.isposinf() if inward else x > format.max if rounding == "up" else x >= format.overflow_from)
    return torch.where(lost, math.nan, result)


def encode(values: Tensor, format: Format) -> Tensor:
    order, codes, nan = (t.to(values.device) for t in _codes(format))
    found = codes[torch.searchsorted(order, values.nan_to_num(0.0)).clamp(max=len(codes) - 1)]
    return torch.where(values.isnan(), nan, found)


def decode(codes: Tensor, format: Format) -> Tensor:
    return _decoded(format).to(codes.device)[codes]


@cache
def _lists(format: Format) -> tuple[Tensor, Tensor, Tensor]:
    values, boundaries = format.values(), format.boundaries()
    even = [code & 1 == 0 for code in _codes(format)[1].tolist()]
    return _wide(values), _wide(boundaries), torch.tensor(even, dtype=torch.bool, device="cpu")


@cache
def _codes(format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """The values, ascending; the first code of each; the code of NaN (0 where there is none)."""
    code_of: dict[float, int] = {}
    for code in format.codes():
        code_of.setdefault(format.decode(code) + 0.0, code)
    nan = [code for code in format.codes() if math.isnan(format.decode(code))]
    return (
        _wide(format.values()),
        torch.tensor([code_of[v] for v in format.values()], dtype=torch.int64, device="cpu"),
        torch.tensor((nan or [0])[0], dtype=torch.int64, device="cpu"),
    )


@cache
def _decoded(format: Format) -> Tensor:
    return _wide([format.decode(code) for code in format.codes()])


def _wide(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
