"""Adam's whole update in one pass over memory, for weights, gradients and moments in fp32, bf16 or fp16.

Per element: decode to float32, update, round, store. The arithmetic is `optim.rules.adam` operation by operation, so
the results are equal bit for bit (no fast-math, no contraction). A tensor's dtype travels in its numpy type, as numpy
has no bfloat16: float32 is itself, bfloat16 is viewed as uint16, float16 as int16.

Integer lanes go through typed intrinsics because numba widens uint16 and uint32 arithmetic to 64 bits, which costs four
to eight times the lanes. They live in this file, not in one of their own: numba's on-disk cache notices edits to a
function's own file only, and a stale kernel would be a silent wrong number.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor


_CHUNK = 1 << 14  # elements a thread takes at a time; divides 2^32, so the high half of the index is constant in it
_PROCESS = os.getpid()  # GNU OpenMP aborts a forked child that starts threads after its parent did
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
    keys = None if seed is None else (np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF))
    threads = torch.get_num_threads()
    if threads == 1 or weight.numel() <= _CHUNK or os.getpid() != _PROCESS:
        _serial(*arrays, *numbers, keys)
        return
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    _parallel(*arrays, *numbers, keys)
    if torch.get_num_threads() != threads:  # numba's pool sets the number of an OpenMP runtime that torch may share
        torch.set_num_threads(threads)


_SCALARS = ("grad_scale", "beta1", "beta2", "l2", "keep", "step_size", "rescale", "eps")


def _array(tensor: Tensor) -> Any:
    return tensor.detach().view(-1).view(_VIEWS[tensor.dtype]).numpy()


# ---- typed lanes -----------------------------------------------------------------------------------------------


def _binary(instruction):
    @intrinsic
    def operation(context, a, b):
        def code(context, builder, signature, arguments):
            return getattr(builder, instruction)(*arguments)

        return types.uint32(types.uint32, types.uint32), code

    return operation


def _convert(instruction, source, target):
    @intrinsic
    def operation(context, a):
        def code(context, builder, signature, arguments):
            return getattr(builder, instruction)(arguments[0], context.get_value_type(target))

        return target(source), code

    return operation


_add, _and, _or, _xor = _binary("add"), _binary("and_"), _binary("or_"), _binary("xor")
_mul, _shl, _shr = _binary("mul"), _binary("shl"), _binary("lshr")
_to_bits = _convert("bitcast", types.float32, types.uint32)
_to_float = _convert("bitcast", types.uint32, types.float32)
_narrow = _convert("trunc", types.uint32, types.uint16)
_widen = _convert("zext", types.uint16, types.uint32)


@intrinsic
def _half_to_float(context, a):
    def code(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), code


@intrinsic
def _float_to_half(context, a):
    def code(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), code


@intrinsic
def _select_above(context, a, b, x, y):
    """x if a > b else y, unsigned."""

    def code(context, builder, signature, arguments):
        a, b, x, y = arguments
        return builder.select(builder.icmp_unsigned(">", a, b), x, y)

    return types.uint32(types.uint32, types.uint32, types.uint32, types.uint32), code


def _decode(stored):
    """The float32 value of a stored float32, bfloat16 (uint16) or float16 (int16)."""


def _encode(value, like):
    """A float32 rounded to nearest-even into the type of `like`."""


@overload(_decode, inline="always")
def _decode_overload(stored):
    if stored == types.uint16:
        return lambda stored: _to_float(_shl(_widen(stored), np.uint32(16)))
    if stored == types.int16:
        return lambda stored: _half_to_float(stored)
    return lambda stored: stored


@overload(_encode, inline="always")
def _encode_overload(value, like):
    if like == types.uint16:
        return lambda value, like: _encode_bf16(value)
    if like == types.int16:
        return lambda value, like: _float_to_half(value)
    return lambda value, like: value


@numba.njit(inline="always")
def _encode_bf16(value):
    u = _to_bits(value)
    even = _and(_shr(u, np.uint32(16)), np.uint32(1))
    return _narrow(_finish(u, _add(_add(u, np.uint32(0x7FFF)), even)))


@numba.njit(inline="always")
def _finish(u, rounded):
    """The upper half of `rounded`, except that NaN stays NaN: adding to its payload could make it infinity."""
    magnitude = _and(u, np.uint32(0x7FFFFFFF))
    nan = _or(u, np.uint32(0x400000))
    return _shr(_select_above(magnitude, np.uint32(0x7F800000), nan, rounded), np.uint32(16))


@numba.njit(inline="always")
def _mix(x):
    """`quant.rounding._mix` in 32-bit lanes."""
    x = _mul(_xor(x, _shr(x, np.uint32(16))), np.uint32(0x7FEB352D))
    x = _mul(_xor(x, _shr(x, np.uint32(15))), np.uint32(0x846CA68B))
    return _xor(x, _shr(x, np.uint32(16)))


@numba.njit(inline="always")
def _encode_stochastic(value, index, low, high):
    """A float32 rounded to bfloat16, up with the probability of the remainder: add 16 noise bits, then truncate."""
    u = _to_bits(value)
    noise = _shr(_mix(_add(_mix(_xor(index, low)), high)), np.uint32(16))
    infinite = _and(u, np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
    return _narrow(_finish(u, u if infinite else _add(u, noise)))


# ---- the update ------------------------------------------------------------------------------------------------


@numba.njit(error_model="numpy", cache=True)
def _update(
    weight, master, grad, exp_avg, exp_avg_sq,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    keys, start,
):  # fmt: skip
    """One chunk, from element `start`. numba drops the branches on `master` and `keys` when it compiles."""
    if keys is not None:
        low, high = keys[0], _add(keys[1], _mul(np.uint32(start >> 32), np.uint32(0x9E3779B9)))
        first = np.uint32(start & 0xFFFFFFFF)
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
            weight[i] = _encode_stochastic(w, _add(first, np.uint32(i)), low, high)


@numba.njit(error_model="numpy", cache=True)
def _serial(
    weight, master, grad, exp_avg, exp_avg_sq,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    keys,
):  # fmt: skip
    for a in range(0, weight.size, _CHUNK):
        b = min(a + _CHUNK, weight.size)
        _update(
            weight[a:b], None if master is None else master[a:b], grad[a:b], exp_avg[a:b], exp_avg_sq[a:b],
            grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
            keys, a,
        )  # fmt: skip


@numba.njit(error_model="numpy", cache=True, parallel=True)
def _parallel(
    weight, master, grad, exp_avg, exp_avg_sq,
    grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
    keys,
):  # fmt: skip
    for chunk in numba.prange((weight.size + _CHUNK - 1) // _CHUNK):
        a = chunk * _CHUNK
        b = min(a + _CHUNK, weight.size)
        _update(
            weight[a:b], None if master is None else master[a:b], grad[a:b], exp_avg[a:b], exp_avg_sq[a:b],
            grad_scale, beta1, rest1, beta2, rest2, l2, keep, step_size, rescale, eps,
            keys, a,
        )  # fmt: skip
