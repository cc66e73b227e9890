"""Adam's whole update in one pass over memory: weights and gradients in fp32, bf16, fp16, moments in these or codes.

Per element: decode to float32, update, round, store. The arithmetic is `optim.rules.adam` operation by operation, so
the results are equal bit for bit (no fast-math, no contraction). A tensor's dtype travels in its numpy type, as numpy
has no bfloat16: float32 is itself, bfloat16 is viewed as uint16, float16 as int16. Moments that are codes of 8 bits in
blocks are decoded and encoded chunk by chunk (`kernels.cpu.coded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.kernels.cpu import coded
from halfstep.kernels.cpu.arrays import array
from halfstep.kernels.cpu.coded import Coded, closed, opened
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, inner, piece
from halfstep.kernels.cpu.lanes import (
    INFINITY,
    MAGNITUDE,
    NAN,
    UPPER,
    bf16_of,
    bits_of,
    lanes,
    rounded_up_half,
    stored_as,
)
from halfstep.kernels.cpu.masters import KEPT, PLAIN, beside, image_or_own
from halfstep.kernels.cpu.noise import chunk_keys, noise, seed_keys


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
        elif name not in ("exp_avg", "exp_avg_sq") or not moment.supported:
            return False
    tensors = [weight, grad, *kept.values(), *numbers.values()]
    return (
        master in KEPT
        and all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu" for t in tensors)
        and all(t.layout == torch.strided and t.is_contiguous() for t in tensors)
        and all(t.dtype in _FLOATS for t in (weight, grad, *numbers.values()))
        and set(numbers) <= {"exp_avg", "exp_avg_sq", "exp_avg_sq_residual"}
        and (rounding == "nearest_even" or (rounding == "stochastic" and weight.dtype == torch.bfloat16))
    )


def run(
    weight: Tensor,
    master: str,
    kept: Mapping[str, Tensor],
    grad: Tensor,
    moments: Mapping[str, Moment],
    scalars: AdamScalars,
    seed: int | None,
) -> None:
    """Update the weight, what its master keeps (once it has followed the weight), and the moments in place.

    `seed` keys the noise of stochastic rounding (`quant.noise_bits`); None rounds the weight to nearest-even.
    """
    beside = [_array(kept[name]) if name in kept else None for name in KEPT.values() if name]
    residual = moments.get("exp_avg_sq_residual")
    numbers: list[Any] = [np.float32(getattr(scalars, name)) for name in _SCALARS]
    numbers[_SCALARS.index("l2")] = np.float32(scalars.l2) if scalars.l2 else None
    numbers[2:2] = [np.float32(1 - scalars.beta1)]
    numbers[4:4] = [np.float32(1 - scalars.beta2)]
    both: list[Any] = []
    for name in ("exp_avg", "exp_avg_sq"):
        moment = moments[name]
        both += moment.arguments() if isinstance(moment, Coded) else (_array(moment), *coded.PLAIN)
    _step(
        weight.numel(), _array(weight), tuple(beside), _array(grad), *both,
        None if residual is None else _array(residual), *numbers,
        seed_keys(seed),
    )  # fmt: skip


_SCALARS = ("grad_scale", "beta1", "beta2", "l2", "keep", "step_size", "rescale", "eps")


def _array(tensor: Any) -> Any:
    return array(tensor, PLAIN[tensor.dtype])


# ---- lanes -----------------------------------------------------------------------------------------------------


@lanes(types.float32)
def _decode(value):
    """The float32 value of a stored number."""
    return bits_of(value).float()


@lanes(types.float32)
def first_moment(m, g, beta1, rest1):
    return m * beta1 + g * rest1


@lanes(types.float32)
def second_moment(v, g, beta2, rest2):
    return v * beta2 + g * g * rest2


@lanes(types.float32)
def moved_weight(weight, m, v, keep, step_size, rescale, eps):
    return weight * keep - m / (v.sqrt() * rescale + eps) * step_size


# A NaN that arithmetic returns is quiet: its upper half alone is one too, so it is enough not to round it.


@lanes("like")
def _encode(value, like):
    """A computed float32 rounded to nearest-even into the type of `like`."""
    if like == types.uint16:
        return (_rounded(value) >> 16).to(16)
    return stored_as(value.bits(), like)


def _rounded(value):
    bits = value.bits()
    return value.is_nan().pick(bits, rounded_up_half(bits))


@lanes(types.uint16)
def _encode_stochastic(value, index, keys):
    """A float32 rounded to bfloat16, up with the probability of the remainder: add 16 noise bits, then truncate."""
    bits = value.bits()
    infinite = (bits & MAGNITUDE).equals(INFINITY)
    return bf16_of(bits, infinite.pick(bits, bits + (noise(keys, index) >> 16)))


@lanes(types.float32)
def _bf16(value):
    """A computed float32 rounded to the nearest bfloat16, in float32."""
    return (_rounded(value) & UPPER).float()


@lanes(types.float32)
def _sum(one, other):
    """The sum of two bfloat16 numbers in float32, rounded to the nearest bfloat16.

    A NaN needs no care: it is one of theirs or the processor's own, whose lower half is zero, and nothing is carried.
    """
    return (rounded_up_half((one + other).bits()) & UPPER).float()


@lanes(types.float32)
def _difference(one, other):
    """The difference of two bfloat16 numbers in float32, rounded to the nearest bfloat16."""
    return (rounded_up_half((one - other).bits()) & UPPER).float()


@lanes(types.uint16)
def _stored(value):
    """A float32 that is a bfloat16 number, as such."""
    return (value.bits() >> 16).to(16)


@lanes(types.float32)
def _join(high, low):
    """The float32 of a rounded upper half and the signed rest (`quant.masters.split`)."""
    upper = high.to(32) << 16
    joined = (upper + (low.to(32) << 16).shift_signed(16)).float()
    return joined.is_nan().pick(upper.float(), joined)


@lanes(types.uint16)
def _upper(value):
    """The upper half of a float32's bits, rounded to nearest with ties away; a NaN's payload may not carry."""
    bits = value.bits()
    return (value.is_nan().pick(bits.constant(NAN), bits + 0x8000) >> 16).to(16)


@lanes(types.uint16)
def _lower(value):
    return value.bits().to(16)


# ---- the update ------------------------------------------------------------------------------------------------


@inner
def _update(
    weight, master, low, compensation, residual, grad, exp_avg, exp_avg_sq, exp_avg_sq_residual,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    keys,
):  # fmt: skip
    """One chunk. numba drops the branches on what is None when it compiles."""
    for i in range(weight.size):
        if master is not None:
            full = image_or_own(weight[i], master[i])
        elif low is not None:
            full = _join(weight[i], low[i])
        else:
            full = _decode(weight[i])
            if residual is not None:
                rest = _decode(beside(weight[i], residual[i]))
                full = full + rest
        g = _decode(grad[i]) * grad_scale
        if l2 is not None:
            g = g + full * l2
        m = first_moment(_decode(exp_avg[i]), g, beta1, rest1)
        v = _decode(exp_avg_sq[i])
        if exp_avg_sq_residual is not None:
            v = v + _decode(exp_avg_sq_residual[i])
        v = second_moment(v, g, beta2, rest2)
        w = moved_weight(full, m, v, keep, step_size, rescale, eps)
        exp_avg[i] = _encode(m, exp_avg[i])
        exp_avg_sq[i] = _encode(v, exp_avg_sq[i])
        if exp_avg_sq_residual is not None:
            exp_avg_sq_residual[i] = _encode(v - _decode(exp_avg_sq[i]), exp_avg_sq_residual[i])
        if low is not None:
            low[i] = _lower(w)
            weight[i] = _upper(w)
        elif compensation is not None:
            c = _sum(_decode(beside(weight[i], compensation[i])), _bf16(w - full))
            moved = _sum(full, c)
            compensation[i] = _stored(_sum(c, _difference(full, moved)))
            weight[i] = _stored(moved)
        elif residual is not None:
            high = _decode(weight[i])
            u = _bf16(w - full)
            total = _sum(high, u)
            rest = _sum(rest, _difference(u, _difference(total, high)))
            grown = _sum(total, rest)
            residual[i] = _stored(_difference(rest, _difference(grown, total)))
            weight[i] = _stored(grown)
        else:
            if master is not None:
                master[i] = w
            if keys is None:
                weight[i] = _encode(w, weight[i])
            else:
                weight[i] = _encode_stochastic(w, i, keys)


@Kernel
def _step(
    weight, kept, grad,
    exp_avg, scale1, levels1, decoding1, scale_of1, numbers1, codes1,
    exp_avg_sq, scale2, levels2, decoding2, scale_of2, numbers2, codes2, exp_avg_sq_residual,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    seed,
):  # fmt: skip
    master, low, compensation, residual = kept
    for chunk in numba.prange((weight.size + CHUNK - 1) // CHUNK):
        a = chunk * CHUNK
        b = min(a + CHUNK, weight.size)
        first = opened(exp_avg, scale1, levels1, decoding1, a, b)
        second = opened(exp_avg_sq, scale2, levels2, decoding2, a, b)
        _update(
            weight[a:b], piece(master, a, b), piece(low, a, b), piece(compensation, a, b), piece(residual, a, b),
            grad[a:b], first, second, piece(exp_avg_sq_residual, a, b),
            grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
            chunk_keys(seed, chunk),
        )  # fmt: skip
        closed(exp_avg, scale1, levels1, scale_of1, numbers1, codes1, first, a, b)
        closed(exp_avg_sq, scale2, levels2, scale_of2, numbers2, codes2, second, a, b)
