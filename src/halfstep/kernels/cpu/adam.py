"""Adam's whole update in one pass over memory: weights and gradients in fp32, bf16, fp16, moments in these or codes.

Per element: decode to float32, update, round, store. The arithmetic is `optim.rules.adam` operation by operation, so
the results are equal bit for bit (no fast-math, no contraction). A tensor's dtype travels in its numpy type, as numpy
has no bfloat16: float32 is itself, bfloat16 is viewed as uint16, float16 as int16. Moments that are codes of 8 bits in
tiles alike are read and written tile by tile (`kernels.cpu.tiled`), others chunk by chunk (`kernels.cpu.coded`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_PLAIN = (Tensor, torch.nn.Parameter)


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


def numbers_of(scalars: AdamScalars) -> tuple[Any, ...]:
    """The numbers of a step as the kernel takes them."""
    s, f = scalars, np.float32
    l2 = f(s.l2) if s.l2 else None
    first, second = (f(s.beta1), f(1 - s.beta1)), (f(s.beta2), f(1 - s.beta2))
    return f(s.grad_scale), *first, *second, l2, f(s.keep), f(s.step_size), f(s.rescale), f(s.eps)


def prepare(
    weight: Tensor, master: str, kept: Mapping[str, Tensor], grad: Tensor, moments: Mapping[str, Moment], rounding: str
) -> Callable[[Tensor, tuple[Any, ...], int | None], bool] | None:
    """The update of a weight, what its master keeps and its moments, in place, for as long as they stay where they are:
    a function of the gradient, the numbers of the step (`numbers_of`) and the seed that keys the noise of stochastic
    rounding (`quant.noise_bits`; None rounds to nearest-even).

    None unless all are dense contiguous CPU tensors, rounded to nearest (bf16: stochastic too). The function returns
    False where a moment under one scale grew beyond what the kernel takes, or is not finite: then nothing was touched.

    Args:
        grad: one like those that the function will be given.
    """
    size = weight.numel()
    floats: list[Tensor] = [weight, grad]
    codes: list[Coded] = []
    for name, moment in moments.items():
        if name not in (_NUMBERS if isinstance(moment, Tensor) else _MOMENTS):
            return None
        if isinstance(moment, Tensor):
            floats.append(moment)
        else:
            codes.append(moment)
    for t in floats:
        if t.dtype not in _FLOATS:
            return None
    for t in (*floats, *kept.values()):
        if (type(t) not in _PLAIN and not hasattr(t, "fake_mode")) or not t.is_cpu or t.layout != torch.strided:
            return None
        if not t.is_contiguous() or t.numel() != size:
            return None
    if master not in KEPT or grad.is_neg():
        return None
    if rounding != "nearest_even" and (rounding != "stochastic" or weight.dtype != torch.bfloat16):
        return None
    twice = master == "none" and "exp_avg_sq_residual" not in moments  # moments can be formed for their size alone
    for moment in codes:
        if not moment.supported or (moment.whole and not twice) or moment.parts["codes"].numel() != size:
            return None
    if hasattr(weight, "fake_mode"):
        return lambda grad, numbers, seed: blank(grad, weight, *kept.values())
    return Update(weight, kept, moments, any(moment.whole for moment in codes) if codes else False)


class Update:
    """What `prepare` returns.

    Args:
        twice: whether a moment is codes under one scale, which the new moments have to be formed for first.
    """

    def __init__(self, weight: Tensor, kept: Mapping[str, Tensor], moments: Mapping[str, Moment], twice: bool) -> None:
        self._size, self._weight, self._moments = weight.numel(), array(weight, PLAIN[weight.dtype]), moments
        self._kept = _NOTHING
        if kept:
            self._kept = tuple(
                [array(kept[name], PLAIN[kept[name].dtype]) if name in kept else None for name in _BESIDE]
            )
        first, second, residual = moments["exp_avg"], moments["exp_avg_sq"], moments.get("exp_avg_sq_residual")
        self._residual = array(residual, PLAIN[residual.dtype]) if isinstance(residual, Tensor) else None
        self._tile, self._both = None, None
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            one, two = array(first, PLAIN[first.dtype]), array(second, PLAIN[second.dtype])
            self._both = [one, *coded.PLAIN, two, *coded.PLAIN]
        elif not twice:
            self._both = _both(moments, {})
        if isinstance(first, Coded) and isinstance(second, Coded):
            self._tile = first.tile if first.tile == second.tile else None

    def __call__(self, grad: Tensor, numbers: tuple[Any, ...], seed: int | None) -> bool:
        gradient, factors, both = array(grad, PLAIN[grad.dtype]), {}, self._both
        if both is None:
            found = self._factors(gradient, numbers)
            if found is None:
                return False
            factors, both = found, _both(self._moments, found)
        keys = None if seed is None else seed_keys(seed)
        step(self._size, self._weight, self._kept, gradient, *both, self._residual, *numbers, keys, self._tile)
        for name, factor in factors.items():
            self._moments[name].parts["scale"].copy_(factor.reciprocal())  # type: ignore[union-attr]
        return True

    def _factors(self, grad: Any, numbers: tuple[Any, ...]) -> dict[str, Tensor] | None:
        """What new moments under one scale are multiplied by; None where they cannot be written."""
        found = np.zeros((-(-self._size // CHUNK), 2), np.uint32)
        codes = {name: moment for name, moment in self._moments.items() if isinstance(moment, Coded)}
        if not all(moment.supported for moment in codes.values()):  # a scale may be anything by now
            return None
        note_largest(self._size, self._weight, grad, *_both(self._moments, {}), *numbers[:6], found)
        factors: dict[str, Tensor] = {}
        for name, amax in zip(_MOMENTS, found.max(0, initial=0).view(np.float32), strict=True):
            if name in codes and not np.isfinite(amax):
                return None
            if name in codes and codes[name].whole:
                factor = whole.factor(codes[name].quantizer, amax)
                if factor is None:
                    return None
                factors[name] = factor
        return factors


def _both(moments: Mapping[str, Moment], factors: Mapping[str, Tensor]) -> list[Any]:
    """What the kernels take for the two moments."""
    both: list[Any] = []
    for name in _MOMENTS:
        moment = moments[name]
        if isinstance(moment, Coded):
            both += moment.arguments(float(factors.get(name, 1.0)))
        else:
            both += array(moment, PLAIN[moment.dtype]), *coded.PLAIN
    return both


_MOMENTS = ("exp_avg", "exp_avg_sq")
_NUMBERS = {*_MOMENTS, "exp_avg_sq_residual"}
_BESIDE = [name for name in KEPT.values() if name]
_NOTHING = (None,) * len(_BESIDE)
