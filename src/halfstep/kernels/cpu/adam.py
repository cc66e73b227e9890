"""Adam's whole update in one pass over memory: weights and gradients in fp32, bf16, fp16, moments in these or codes.

Per element: decode to float32, update, round, store. The arithmetic is `optim.rules.adam` operation by operation, so
the results are equal bit for bit (no fast-math, no contraction). A tensor's dtype travels in its numpy type, as numpy
has no bfloat16: float32 is itself, bfloat16 is viewed as uint16, float16 as int16. Moments that are codes of 8 bits in
tiles alike are read and written tile by tile (`kernels.cpu.tiled`), others chunk by chunk (`kernels.cpu.coded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.blank import blank
from halfstep.kernels.cpu import coded, whole
from halfstep.kernels.cpu.adam_update import note_largest, step
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.cpu.compiled import CHUNK
from halfstep.kernels.cpu.masters import KEPT, PLAIN
from halfstep.kernels.cpu.noise import seed_keys


Moment = Tensor | Coded

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AdamScalars:
    """The numbers of one Adam step, rounded to float32 where the update uses them."""

    grad_scale: float
    """What the stored gradient is multiplied by first: 1/S, the clipping coefficient, -1 to maximize."""
    beta1: float
    beta2: float
    l2: float
    """Weight decay added to the gradient (Adam); 0 for AdamW."""
    keep: float
    """What the weight is multiplied by: 1 - lr * weight_decay (AdamW); 1 for Adam."""
    step_size: float
    """lr / (1 - beta1^t)"""
    rescale: float
    """1 / sqrt(1 - beta2^t)"""
    eps: float


def supports(
    weight: Tensor, master: str, kept: Mapping[str, Tensor], grad: Tensor, moments: Mapping[str, Moment], rounding: str
) -> bool:
    """Whether `run` can do this update: dense contiguous CPU tensors, rounding to nearest (bf16: stochastic too)."""
    numbers: dict[str, Tensor] = {}
    for name, moment in moments.items():
        if isinstance(moment, Tensor):
            numbers[name] = moment
        elif (
            name not in _MOMENTS
            or not moment.supported
            or (moment.whole and not _forms_twice(master, moments))
            or moment.parts["codes"].numel() != weight.numel()
        ):
            return False
    tensors = [weight, grad, *kept.values(), *numbers.values()]
    return (
        master in KEPT
        and all(
            (type(t) in (Tensor, torch.nn.Parameter) or hasattr(t, "fake_mode")) and t.device.type == "cpu"
            for t in tensors
        )
        and all(t.layout == torch.strided and t.is_contiguous() and t.numel() == weight.numel() for t in tensors)
        and not grad.is_neg()
        and all(t.dtype in _FLOATS for t in (weight, grad, *numbers.values()))
        and set(numbers) <= {"exp_avg", "exp_avg_sq", "exp_avg_sq_residual"}
        and (rounding == "nearest_even" or (rounding == "stochastic" and weight.dtype == torch.bfloat16))
    )


def _forms_twice(master: str, moments: Mapping[str, Moment]) -> bool:
    """Whether new moments can be formed for their magnitudes alone: from the weight itself, each from one number."""
    return master == "none" and "exp_avg_sq_residual" not in moments


def run(
    weight: Tensor,
    master: str,
    kept: Mapping[str, Tensor],
    grad: Tensor,
    moments: Mapping[str, Moment],
    scalars: AdamScalars,
    seed: int | None,
) -> bool:
    """Update the weight, what its master keeps (once it has followed the weight), and the moments in place.

    False where a moment under one scale grew beyond what the kernels take, or is not finite: then nothing was touched.
    `seed` keys the noise of stochastic rounding (`quant.noise_bits`); None rounds the weight to nearest-even.
    """
    if hasattr(weight, "fake_mode"):
        return blank(grad, weight, *kept.values())
    beside = [_array(kept[name]) if name in kept else None for name in KEPT.values() if name]
    residual = moments.get("exp_avg_sq_residual")
    numbers: list[Any] = [np.float32(getattr(scalars, name)) for name in _SCALARS]
    numbers[_SCALARS.index("l2")] = np.float32(scalars.l2) if scalars.l2 else None
    numbers[2:2] = [np.float32(1 - scalars.beta1)]
    numbers[4:4] = [np.float32(1 - scalars.beta2)]
    wholes = [name for name in _MOMENTS if isinstance(moment := moments[name], Coded) and moment.whole]
    factors: dict[str, Tensor] = {}
    if wholes:
        found = np.zeros((-(-weight.numel() // CHUNK), 2), np.uint32)
        note_largest(weight.numel(), _array(weight), _array(grad), *_both(moments, {}), *numbers[:6], found)
        for name, amax in zip(_MOMENTS, found.max(0, initial=0).view(np.float32), strict=True):
            if isinstance(moments[name], Coded) and not np.isfinite(amax):
                return False
            if name in wholes:
                factor = whole.factor(moments[name].quantizer, amax)  # type: ignore[union-attr]
                if factor is None:
                    return False
                factors[name] = factor
    step(
        weight.numel(), _array(weight), tuple(beside), _array(grad), *_both(moments, factors),
        None if residual is None else _array(residual), *numbers,
        seed_keys(seed), _tile(moments),
    )  # fmt: skip
    for name, factor in factors.items():
        moments[name].parts["scale"].copy_(factor.reciprocal())  # type: ignore[union-attr]
    return True


def _both(moments: Mapping[str, Moment], factors: Mapping[str, Tensor]) -> list[Any]:
    """What the kernels take for the two moments."""
    both: list[Any] = []
    for name in _MOMENTS:
        moment = moments[name]
        factor = float(factors.get(name, 1.0))
        both += moment.arguments(factor) if isinstance(moment, Coded) else (_array(moment), *coded.PLAIN)
    return both


def _tile(moments: Mapping[str, Moment]) -> Any:
    """The tile of both moments, as `blocks.levels`, where they advance a tile at a time (`tiled`); else None."""
    tiles = {moment.tile if isinstance(moment, Coded) else None for moment in moments.values()}
    return tiles.pop() if len(tiles) == 1 else None


_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALARS = ("grad_scale", "beta1", "beta2", "l2", "keep", "step_size", "rescale", "eps")


def _array(tensor: Any) -> Any:
    return array(tensor, PLAIN[tensor.dtype])
