"""Stochastic gradient descent with momentum, in torch.optim.SGD's form."""

from collections.abc import Mapping
from typing import Any

import torch

from halfstep.kernels.arithmetic import where
from halfstep.optim.rules import Group, learning_rate
from halfstep.optim.rules.elementwise import elementwise


def _element(weight: Any, grad: Any, moments: Mapping[str, Any], o: Any) -> tuple[Any, dict[str, Any]]:
    """b <- momentum b + (1 - dampening) g, from b = g at the first step; w <- w - lr b.

    With Nesterov momentum w <- w - lr (g + momentum b).

    Source: Sutskever et al. 2013 for the momentum, in the form torch.optim.SGD documents.
    """
    if o.l2 is not None:
        grad = grad + weight * o.l2
    if o.momentum is None:
        return weight - grad * o.lr, {}
    buffer = where(o.step > 1, moments["momentum_buffer"] * o.momentum + grad * (1 - o.dampening), grad)
    direction = grad + buffer * o.momentum if o.nesterov else buffer
    return weight - direction * o.lr, {"momentum_buffer": buffer}


def _options(group: Group) -> dict[str, Any]:
    return {
        "lr": learning_rate(group), "l2": float(group["weight_decay"]) or None,
        "momentum": float(group["momentum"]) or None, "dampening": float(group["dampening"]),
        "nesterov": bool(group["nesterov"]),
    }  # fmt: skip


sgd = elementwise(
    "sgd", torch.optim.SGD, lambda group: ("momentum_buffer",) if group["momentum"] else (), _element, _options,
    refused={"differentiable": "the update runs without autograd"},
    decay=lambda group: (float(group["weight_decay"]), 1.0),
)  # fmt: skip
