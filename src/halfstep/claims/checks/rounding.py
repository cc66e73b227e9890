"""Checks of rounding on its own: ranges, bias, gradients that become zero, and accumulation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep import formats, round_to
from halfstep.claims.checks.base import Numbers, check
from halfstep.recipe import DTYPES
from halfstep.tracking import share_zeroed


def _small_gradients() -> Tensor:
    """A million gradients 2^U(-30, -15)."""
    exponents = (
        torch.rand(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu") * 15 - 30
    )
    return torch.exp2(exponents).float()


@check("micikevicius-loss-scale")
def loss_scale() -> Numbers:
    """The share of small gradients that fp16 makes zero, by loss scale."""
    gradients = _small_gradients()
    scales = {"s1": 1, "s8": 8, "s128": 128, "s1024": 1024}
    return {name: share_zeroed([gradients * scale], formats.get("fp16")) for name, scale in scales.items()}


@check("kalamkar-range")
def bfloat16_range() -> Numbers:
    """The ends of bf16's range, the lower as a power of two, and the share of small gradients it makes zero."""
    found: Numbers = {"zeroed": share_zeroed([_small_gradients()], formats.get("bf16"))}
    for name in ("fp32", "bf16", "fp16"):
        finfo = torch.finfo(DTYPES[name])
        found |= {f"{name}_largest": finfo.max, f"{name}_normal": math.log2(finfo.tiny)}
    return found


@check("kalamkar-rounding")
def rounding() -> Numbers:
    """What a cast to bf16 does to the magnitude of a million N(0, 1) values: mean and largest relative change."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    found: Numbers = {}
    for short, mode in (("nearest", "nearest_even"), ("truncated", "toward_zero")):
        change = (round_to(x, "bf16", mode).double() / x.double()) - 1
        found |= {f"{short}_mean": float(change.mean()), f"{short}_max": float(change.abs().max())}
    return found


@check("micikevicius-accumulate")
def accumulate() -> Numbers:
    """Relative errors of dot products of 4096 values from U(0.5, 1.5), by the format of the running sum."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 4096, 256, generator=generator, dtype=torch.float32, device="cpu") + 0.5
    exact = (x.double() * y.double()).sum(0)

    # A product of two rounded inputs is exact in float32; a sum is rounded there, and once more to `sums`.
    def error(inputs: str, sums: str, mode: str = "nearest_even") -> float:
        total = torch.zeros(256, dtype=torch.float32, device="cpu")
        for a, b in zip(round_to(x, inputs, mode), round_to(y, inputs, mode), strict=True):
            total = (total + a * b).to(DTYPES[sums]).float()
        return float((total.double() / exact - 1).mean())

    return {
        "fp16_fp32": error("fp16", "fp32"),
        "fp16_fp16": error("fp16", "fp16"),
        "bf16_fp32": error("bf16", "fp32"),
        "bf16_bf16": error("bf16", "bf16"),
        "truncated_fp32": error("bf16", "fp32", "toward_zero"),
    }
