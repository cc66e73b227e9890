"""LAMB: AdamW whose step on each tensor is as long as the tensor's norm allows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep.optim.classes import Lamb
from halfstep.optim.rules.base import Group, Moments, UpdateRule


def _update(weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
    """w <- w - lr (|w| / |r|) r with r = m' / (sqrt(v') + eps) + decay w and Adam's corrected moments m', v'.

    The ratio is 1 where either norm is 0.

    Source: You et al. 2019, arXiv 1904.00962, algorithm 2.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if group["maximize"]:
        grad = -grad
    first = moments["exp_avg"] * beta1 + grad * (1 - beta1)
    second = moments["exp_avg_sq"] * beta2 + grad * grad * (1 - beta2)
    root = torch.sqrt(second) / math.sqrt(1 - beta2**step) + float(group["eps"])
    direction = first / (1 - beta1**step) / root + weight * float(group["weight_decay"])
    norm, length = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(direction)
    trust = torch.where((norm > 0) & (length > 0), norm / length, 1.0)
    return weight - direction * (float(group["lr"]) * trust), {"exp_avg": first, "exp_avg_sq": second}


lamb = UpdateRule("lamb", Lamb, lambda group: ("exp_avg", "exp_avg_sq"), _update, elementwise=False)
