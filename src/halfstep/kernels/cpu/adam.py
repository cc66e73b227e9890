"""Adam's whole update in one pass over memory, for weights, gradients and moments in fp32, bf16 or fp16.

Per element: decode to float32, update, round, store. The arithmetic is `optim.rules.adam` operation by operation, so
the results are equal bit for bit (no fast-math, no contraction). A tensor's dtype travels in its numpy type, as numpy
has no bfloat16: float32 is itself, bfloat16 is viewed as uint16, float16 as int16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner, piece
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, bf16_of, bits_of, lanes, nearest_as
from halfstep.kernels.cpu.noise import chunk_keys, noise, seed_keys


_VIEWS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


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
    weight: Tensor, master: Tensor | None, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rounding: str
) -> bool:
    """Whether `run` can do this update: dense contiguous CPU tensors, rounding to nearest (bf16: stochastic too)."""
    tensors = [weight, grad, exp_avg, exp_avg_sq, *([master] if master is not None else [])]
    return (
        all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu" for t in tensors)
        and all(t.layout == torch.strided and t.is_contiguous() and t.dtype in _VIEWS for t in tensors)
        and exp_avg.dtype == exp_avg_sq.dtype
        and (rounding == "nearest_even" or (rounding == "stochastic" and weight.dtype == torch.bfloat16))
    )


def run(
    weight: Tensor,
    master: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: AdamScalars,
    seed: int | None,
) -> None:
    """Update `weight`, `master` (where there is one) and both moments in place.

    `seed` keys the noise of stochastic rounding (`quant.noise_bits`); None rounds the weight to nearest-even.
    """
    arrays = [None if t is None else _array(t) for t in (weight, master, grad, exp_avg, exp_avg_sq)]
    numbers = [np.float32(getattr(scalars, name)) for name in _SCALARS]
    numbers[2:2] = [np.float32(1 - scalars.beta1)]
    numbers[4:4] = [np.float32(1 - scalars.beta2)]
    _step(weight.numel(), *arrays, *numbers, seed_keys(seed))


_SCALARS = ("grad_scale", "beta1", "beta2", "l2", "keep", "step_size", "rescale", "eps")


def _array(tensor: Tensor) -> Any:
    return tensor.detach().view(-1).view(_VIEWS[tensor.dtype]).numpy()


# ---- lanes -----------------------------------------------------------------------------------------------------


@lanes(types.float32)
def _decode(value):
    """The float32 value of a stored number."""
    return bits_of(value).float()


@lanes("like")
def _encode(value, like):
    """A float32 rounded to nearest-even into the type of `like`."""
    return nearest_as(value, like)


@lanes(types.uint16)
def _encode_stochastic(value, index, keys):
    """A float32 rounded to bfloat16, up with the probability of the remainder: add 16 noise bits, then truncate."""
    bits = value.bits()
    infinite = (bits & MAGNITUDE).equals(INFINITY)
    return bf16_of(bits, infinite.pick(bits, bits + (noise(keys, index) >> 16)))


# ---- the update ------------------------------------------------------------------------------------------------


@inner
def _update(
    weight, master, grad, exp_avg, exp_avg_sq,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    keys,
):  # fmt: skip
    """One chunk. numba drops the branches on `master` and `keys` when it compiles."""
    for i in range(weight.size):
        w = _decode(weight[i]) if master is None else master[i]
        g = _decode(grad[i]) * grad_scale
        if l2 != 0:
            g = g + w * l2
        m = _decode(exp_avg[i]) * beta1 + g * rest1
        v = _decode(exp_avg_sq[i]) * beta2 + g * g * rest2
        w = w * keep - m / (math.sqrt(v) * rescale + eps) * step_size
        exp_avg[i] = _encode(m, exp_avg[i])
        exp_avg_sq[i] = _encode(v, exp_avg_sq[i])
        if master is not None:
            master[i] = w
        if keys is None:
            weight[i] = _encode(w, weight[i])
        else:
            weight[i] = _encode_stochastic(w, i, keys)


@Kernel
def _step(
    weight, master, grad, exp_avg, exp_avg_sq,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    seed,
):  # fmt: skip
    for chunk in numba.prange((weight.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, weight.size)
        _update(
            weight[a:b], piece(master, a, b), grad[a:b], exp_avg[a:b], exp_avg_sq[a:b],
            grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
            chunk_keys(seed, chunk),
        )  # fmt: skip
