"""Adam, with weight decay added to the gradient (L2)."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.cpu import adam as kernel
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.gpu.kinds import Options
from halfstep.optim.rules.base import (
    CAPTURABLE,
    ON_HOST,
    Fused,
    Group,
    Moments,
    Step,
    UpdateRule,
    as_kept,
    learning_rate,
)
from halfstep.quant import Quantizer
from halfstep.quant.tile import Tile


REFUSED = {
    "amsgrad": "its running maximum is a third moment that no recipe has a format for",
    "differentiable": "the update runs without autograd",
    CAPTURABLE: ON_HOST,
}
REFUSED_STATES = {"max_exp_avg_sq": "it is AMSGrad's running maximum, which no recipe has a format for"}


def scalars(step: int, group: Group, grad_scale: float, decoupled: bool) -> kernel.AdamScalars:
    """The numbers of one step, from a group's options as torch.optim names them."""
    beta1, beta2 = map(float, group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    return kernel.AdamScalars(
        grad_scale=-grad_scale if group.get("maximize") else grad_scale,
        beta1=beta1,
        beta2=beta2,
        l2=0.0 if decoupled else decay,
        keep=1 - lr * decay if decoupled else 1.0,
        step_size=lr / (1 - beta1**step),
        rescale=1 / math.sqrt(1 - beta2**step),
        eps=float(group["eps"]),
    )


def move(weight: Tensor, grad: Tensor, moments: Moments, s: kernel.AdamScalars) -> tuple[Tensor, Moments]:
    """w <- keep w - step_size m / (rescale sqrt(v) + eps), with m and v the decayed means of g and g^2.

    One rounding an operation, in this order, so that a kernel can be equal bit for bit.
    Source: Kingma and Ba 2015, arXiv 1412.6980, algorithm 1; Loshchilov and Hutter 2019 for the decoupled decay.
    """
    grad = grad * s.grad_scale
    if s.l2:
        grad = grad + weight * s.l2
    exp_avg = moments["exp_avg"] * s.beta1 + grad * (1 - s.beta1)
    exp_avg_sq = moments["exp_avg_sq"] * s.beta2 + grad * grad * (1 - s.beta2)
    # By way of float64: torch's float32 square root on CPUs is off by an ulp in 0.6 % of the elements of long tensors.
    root = torch.sqrt(exp_avg_sq.double()).float()
    ratio = exp_avg / (root * s.rescale + s.eps)
    return weight * s.keep - ratio * s.step_size, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _in_rows(coded: Coded) -> Coded:
    """The same codes, in tiles no longer than a row, which kernels ask for: where a tile is longer, the row is all that
    shares its scale."""
    columns = coded.shape[-1] if coded.shape else 1
    return coded._replace(quantizer=_with_tiles_in_rows(coded.quantizer, columns))


@cache
def _with_tiles_in_rows(quantizer: Quantizer, columns: int) -> Quantizer:
    scales = quantizer.scales
    if scales is None or scales.tile.rows != 1 or not columns < (scales.tile.columns or 0):
        return quantizer
    return replace(quantizer, scales=replace(scales, tile=Tile(1, columns)))


def adam_rule(name: str, torch_class: type[torch.optim.Optimizer], decoupled: bool) -> UpdateRule:
    """Adam's rule; `decoupled` makes it AdamW's."""

    def is_decoupled(group: Group) -> bool:
        return bool(group.get("decoupled_weight_decay", decoupled))

    def decay(group: Group) -> tuple[float, float]:
        s = scalars(1, group, 1.0, is_decoupled(group))
        return s.l2, s.keep

    def update(weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
        return move(weight, grad, moments, scalars(step, group, 1.0, is_decoupled(group)))

    def fused(step: Step) -> Fused | None:
        master = step.master
        moments: dict[str, Tensor | Coded] = {**step.moments}
        if master.positions is not None:
            return None
        if step.coded:
            moments = as_kept(step)
            for name, kept in moments.items():
                if isinstance(kept, Coded):
                    moments[name] = _in_rows(kept)
        return kernel.prepare(step.weight, master.name, step.kept, step.grad, moments, master.rounding)

    def numbers(number: int, group: Group, grad_scale: float) -> Any:
        return kernel.numbers_of(scalars(number, group, grad_scale, is_decoupled(group)))

    def options(group: Group) -> Options:
        beta1, beta2 = map(float, group["betas"])
        decay = float(group["weight_decay"])
        l2, taken = (0.0, decay) if is_decoupled(group) else (decay, 0.0)
        sign, eps = -1.0 if group.get("maximize") else 1.0, float(group["eps"])
        return Options("adam", learning_rate(group), sign, beta1, 1 - beta1, beta2, l2, taken, eps)

    names = ("exp_avg", "exp_avg_sq")
    return UpdateRule(
        name, torch_class, lambda group: names, update, REFUSED, REFUSED_STATES, fused, numbers, decay=decay,
        options=options,
    )  # fmt: skip


adam = adam_rule("adam", torch.optim.Adam, decoupled=False)
