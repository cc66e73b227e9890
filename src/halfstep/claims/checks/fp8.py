"""Checks of scalings for 8 bits: which way a block's scale is rounded, how long a history is, where one scale does."""

from __future__ import annotations

import torch

from halfstep import formats, get_quantizer
from halfstep.claims.checks.base import Numbers, check
from halfstep.ops.operand import operand
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.scaling.delayed import Delayed
from halfstep.quant.tile import TENSOR


def _normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


@check("te-mx-roundup")
def mx_roundup() -> Numbers:
    """MXFP8 blocks of 32 normal numbers whose largest saturates, and the relative error, by the scale's rounding."""
    x = _normal(32768, 32)
    found: Numbers = {}
    for rule in ("rceil", "floor"):
        quantizer = get_quantizer("mxfp8_e4m3", scale=rule)
        quantized = quantizer.quantize(x)
        scale = get_scaling(rule).multiplier(quantized.tensors, quantizer.format)[:, 0]
        found[f"{rule}_saturated"] = float((x.abs().amax(1) > 448 * scale).double().mean())
        found[f"{rule}_error"] = float((quantized.dequantize() - x).norm() / x.norm())
    return found


@check("te-history")
def history() -> Numbers:
    """The share of 200 steps in which an amax that alternates between 1 and 8 saturates E4M3, by the history."""
    e4m3, found = formats.get("e4m3fn"), Numbers()
    for name, scaling in (
        ("most_recent", Delayed("delayed", history=1, algorithm="most_recent")),
        ("max_1024", Delayed("delayed", history=1024, algorithm="max")),
    ):
        state, clipped = scaling.init(), 0
        for step in range(202):
            amax = torch.tensor(8.0 if step % 2 else 1.0, dtype=torch.float32, device="cpu")
            clipped += step >= 2 and bool(amax * state[0] > 448)  # the first two find the scale
            scaling.record(state, amax)
            scaling.advance(state, e4m3)
        found[name] = clipped / 200
    return found


_FP16 = formats.get("fp16").max


def _largest_sum(pair: tuple[str, str], margin: int) -> float:
    """The largest sum over 512 products of normal numbers, scaled with that margin and rounded to the formats."""
    scales = Scales(TENSOR, get_scaling("rceil", margin=margin))
    x, w = _normal(64, 512), _normal(512, 64, seed=1)
    lhs, rhs = (
        operand(t, Quantizer(formats.get(name), scales=scales), torch.float32).values
        for t, name in zip((x, w), pair, strict=True)
    )
    return float((lhs.double() @ rhs.double()).abs().max())


@check("perez-margin")
def margin() -> Numbers:
    """The largest sum in a product of 512 scaled FP8 numbers by margin, and the margin from which it fits fp16."""
    found: Numbers = {}
    for name, pair in (("forward", ("e4m3fnuz", "e4m3fnuz")), ("backward", ("e5m2fnuz", "e4m3fnuz"))):
        sums = [_largest_sum(pair, room) for room in range(8)]
        found |= {f"{name}_{room}": sums[room] for room in (0, 1, 3)}
        found[f"{name}_fits"] = next(room for room, largest in enumerate(sums) if largest <= _FP16)
    return found


@check("perez-window")
def window() -> Numbers:
    """The relative error of a product when every tensor has the constant bias c."""
    x, w = _normal(64, 512), _normal(512, 64, seed=1) / 8
    exact, found = x.double() @ w.double(), Numbers()
    for bias in (-8, -4, 0, 4, 8):
        quantizer = Quantizer(formats.get("e4m3fnuz"), scales=Scales(TENSOR, get_scaling("fixed", bias=bias)))
        lhs, rhs = (operand(t, quantizer, torch.float32) for t in (x, w))
        product = lhs.values.double() @ rhs.values.double() * 2.0 ** (-2 * bias)
        found[f"c{bias}".replace("-", "_")] = float((product - exact).norm() / exact.norm())
    return found
