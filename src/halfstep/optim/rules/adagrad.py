"""Adagrad: the gradient over the root of the sum of all squares so far, in torch.optim.Adagrad's form."""

from collections.abc import Mapping
from typing import Any

import torch

from halfstep.kernels.arithmetic import root
from halfstep.optim.rules import Group, learning_rate
from halfstep.optim.rules.elementwise import elementwise


def _element(weight: Any, grad: Any, moments: Mapping[str, Any], o: Any) -> tuple[Any, dict[str, Any]]:
    """s <- s + g^2;  w <- w - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps).

    Source: Duchi et al. 2011, in the form torch.optim.Adagrad documents.
    """
    if o.l2 is not None:
        grad = grad + weight * o.l2
    total = moments["sum"] + grad * grad
    return weight - grad / (root(total) + o.eps) * (o.lr / (1 + (o.step - 1) * o.lr_decay)), {"sum": total}


def _options(group: Group) -> dict[str, Any]:
    return {
        "lr": learning_rate(group), "lr_decay": float(group["lr_decay"]), "l2": float(group["weight_decay"]) or None,
        "eps": float(group["eps"]),
    }  # fmt: skip


_REFUSED = {
    "differentiable": "the update runs without autograd",
    "initial_accumulator_value": "moments start at zero",
}

adagrad = elementwise(
    "adagrad", torch.optim.Adagrad, lambda group: ("sum",), _element, _options, refused=_REFUSED,
    kept_as=lambda name, group: None,  # in few bits the sum would stop growing: squares are rounded away
    decay=lambda group: (float(group["weight_decay"]), 1.0),
)  # fmt: skip
