"""Checks of what an addition in few bits loses, and what a master copy keeps."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import halfstep
from halfstep.claims.checks.base import Numbers, check, stepped


def _mantissas(bits: int) -> Tensor:
    """The values in [1, 2) with that many bits after the point."""
    return 1 + torch.arange(1 << bits, dtype=torch.float32, device="cpu") / (1 << bits)


def _lost(weight: Tensor, update: Tensor, format: str, rounding: str = "nearest_even") -> Tensor:
    """Where weight + update, rounded to the format, is the weight again; exact in float64 before it is rounded."""
    total = weight.double() + update.double()
    return torch.eq(halfstep.round_to(total, format, rounding), weight)


@check("micikevicius-ratio")
def ratio() -> Numbers:
    """|w| / |u| at which updates are lost: every mantissa of w and of u, added and subtracted."""
    found: Numbers = {}
    for format, bits in (("fp16", 10), ("bf16", 7)):
        weights, steps = _mantissas(bits)[:, None], _mantissas(bits)[None, :]
        first, last = float("inf"), 0.0
        for gap in range(bits - 1, bits + 4):
            for sign in (1, -1):
                update = sign * steps * 2.0**-gap
                lost, ratios = _lost(weights, update, format), (weights / update).abs()
                first = min(first, float(ratios[lost].min()) if lost.any() else first)
                last = max(last, float(ratios[~lost].max()) if (~lost).any() else last)
        found |= {f"{format}_first": first, f"{format}_last": last}
    ones = _mantissas(10)
    found["at_2048"] = float(_lost(ones, ones / 2048, "fp16").double().mean())
    found["at_4096"] = float(_lost(ones, ones / 4096, "fp16").double().mean())
    return found


@check("slides-exponents")
def exponents() -> Numbers:
    """The share of all fp16 additions that are lost when the exponents differ by 10, 11 and 12."""
    weights, steps = _mantissas(10)[:, None], _mantissas(10)[None, :]
    return {
        f"{short}_{gap}": float(_lost(weights, steps * 2.0**-gap, "fp16", rounding).double().mean())
        for short, rounding in (("nearest", "nearest_even"), ("truncated", "toward_zero"))
        for gap in (10, 11, 12)
    }


@check("micikevicius-master")
def stall() -> Numbers:
    """Where 4096 updates of -2^-12 take a weight of 1, by recipe."""
    ends: Numbers = {}
    for recipe in ("fp16-nomaster", "fp16-master", "bf16-nomaster", "bf16-master", "fp32"):
        ones = torch.ones(16, dtype=torch.float32, device="cpu")
        weight, _ = stepped(recipe, ones, partial(torch.optim.SGD, lr=1.0), 2.0**-12, 4096)
        ends[recipe.replace("-", "_")] = float(weight.detach().double().mean())
    return ends
