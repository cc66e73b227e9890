"""Stochastic gradient descent with momentum, in torch.optim.SGD's form."""

import torch
from torch import Tensor

from halfstep.kernels.gpu.kinds import Options
from halfstep.optim.rules.base import Group, Moments, UpdateRule, learning_rate


def _moments(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _update(weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
    """b <- momentum b + (1 - dampening) g, from b = g at the first step; w <- w - lr b.

    With Nesterov momentum w <- w - lr (g + momentum b).

    Source: Sutskever et al. 2013 for the momentum, in the form torch.optim.SGD documents.
    """
    lr, momentum = float(group["lr"]), float(group["momentum"])
    if group.get("maximize"):
        grad = -grad
    if group["weight_decay"]:
        grad = grad + weight * float(group["weight_decay"])
    if not momentum:
        return weight - grad * lr, {}
    buffer = grad
    if step > 1:
        buffer = moments["momentum_buffer"] * momentum + grad * (1 - float(group["dampening"]))
    direction = grad + buffer * momentum if group["nesterov"] else buffer
    return weight - direction * lr, {"momentum_buffer": buffer}


def _options(group: Group) -> Options:
    momentum, sign = float(group["momentum"]), -1.0 if group.get("maximize") else 1.0
    lr, decay, nesterov = learning_rate(group), float(group["weight_decay"]), bool(group["nesterov"])
    if not momentum:
        return Options("descent", lr, sign, l2=decay)
    return Options("momentum", lr, sign, momentum, 1 - float(group["dampening"]), l2=decay, nesterov=nesterov)


_REFUSED = {"differentiable": "the update runs without autograd"}

sgd = UpdateRule(
    "sgd", torch.optim.SGD, _moments, _update, _REFUSED, decay=lambda group: (float(group["weight_decay"]), 1.0),
    options=_options,
)  # fmt: skip
