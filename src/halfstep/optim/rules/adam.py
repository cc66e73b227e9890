"""Adam, with weight decay added to the gradient (L2); and AdamW, whose decay is applied to the weight."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from halfstep.kernels.arithmetic import root
from halfstep.optim.rules import REFUSED, Group, UpdateRule, learning_rate
from halfstep.optim.rules.elementwise import elementwise


_REFUSED = {"amsgrad": "its running maximum is a third moment that no recipe has a format for", **REFUSED}
_REFUSED_STATES = {"max_exp_avg_sq": "it is AMSGrad's running maximum, which no recipe has a format for"}


def element(weight: Any, grad: Any, moments: Mapping[str, Any], o: Any) -> tuple[Any, dict[str, Any]]:
    """w <- (1 - lr decay) w - lr m' / (sqrt(v') + eps), with m' and v' the corrected decayed means of g and g^2.

    Source: Kingma and Ba 2015, arXiv 1412.6980, algorithm 1; Loshchilov and Hutter 2019 for the decoupled decay.
    """
    if o.l2 is not None:
        grad = grad + weight * o.l2
    exp_avg = moments["exp_avg"] * o.beta1 + grad * (1 - o.beta1)
    exp_avg_sq = moments["exp_avg_sq"] * o.beta2 + grad * grad * (1 - o.beta2)
    ratio = exp_avg / (root(exp_avg_sq) * o.rescale + o.eps)
    moved = weight * (1 - o.lr * o.decay) - ratio * (o.lr / o.correction)
    return moved, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def by_step(step: int, group: Group) -> dict[str, float]:
    """Adam's bias corrections of both moments at a step."""
    beta1, beta2 = map(float, group["betas"])
    return {"correction": 1 - beta1**step, "rescale": 1 / math.sqrt(1 - beta2**step)}


def decays(group: Group, decoupled: bool = False) -> tuple[float, float]:
    """(L2, decoupled decay): the factor of the weight that is added to its gradient, and the one that, times the
    learning rate, is subtracted. `decoupled` is the default for groups without `decoupled_weight_decay`."""
    decay = float(group["weight_decay"])
    return (0.0, decay) if group.get("decoupled_weight_decay", decoupled) else (decay, 0.0)


def options(group: Group, decoupled: bool = False) -> dict[str, Any]:
    """Adam's options as scalars for the formula."""
    (beta1, beta2), (l2, taken) = map(float, group["betas"]), decays(group, decoupled)
    return {
        "lr": learning_rate(group), "beta1": beta1, "beta2": beta2, "l2": l2 or None, "decay": taken,
        "eps": float(group["eps"]),
    }  # fmt: skip


def decay(group: Group, decoupled: bool = False) -> tuple[float, float]:
    """`UpdateRule.decay` of Adam and AdamW."""
    l2, taken = decays(group, decoupled)
    return l2, 1 - float(group["lr"]) * taken


def adam_rule(name: str, torch_class: type[torch.optim.Optimizer], decoupled: bool) -> UpdateRule:
    """Adam's rule; `decoupled` makes it AdamW's."""
    return elementwise(
        name, torch_class, lambda group: ("exp_avg", "exp_avg_sq"), element, partial(options, decoupled=decoupled),
        by_step, refused=_REFUSED, refused_states=_REFUSED_STATES, decay=partial(decay, decoupled=decoupled),
    )  # fmt: skip


adam = adam_rule("adam", torch.optim.Adam, decoupled=False)


adamw = adam_rule("adamw", torch.optim.AdamW, decoupled=True)
