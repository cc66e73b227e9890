"""Lion: the sign of a momentum, with one moment instead of Adam's two."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.kernels.gpu.kinds import Options
from halfstep.optim.classes import Lion
from halfstep.optim.rules.base import Group, Moments, UpdateRule, learning_rate


def _update(weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
    """w <- (1 - lr decay) w - lr sign(beta1 m + (1 - beta1) g);  m <- beta2 m + (1 - beta2) g.

    Source: Chen et al. 2023, arXiv 2302.06675, program 1.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if group["maximize"]:
        grad = -grad
    momentum = moments["exp_avg"]
    blend = momentum * beta1 + grad * (1 - beta1)
    direction = torch.sign(blend) + (blend - blend)  # the sign of an infinity would hide it: NaN shows
    return weight * (1 - lr * decay) - direction * lr, {"exp_avg": momentum * beta2 + grad * (1 - beta2)}


def _options(group: Group) -> Options:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    sign = -1.0 if group["maximize"] else 1.0
    return Options("lion", learning_rate(group), sign, beta1, 1 - beta1, beta2, decay=float(group["weight_decay"]))


lion = UpdateRule("lion", Lion, lambda group: ("exp_avg",), _update, options=_options)
