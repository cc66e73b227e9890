"""RMSprop: the gradient over the root of its decayed square, in torch.optim.RMSprop's form."""

from collections.abc import Mapping
from typing import Any

import torch

from halfstep.kernels.arithmetic import root, where
from halfstep.optim.rules import REFUSED, Group, learning_rate
from halfstep.optim.rules.elementwise import elementwise


def _moments(group: Group) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))


def _kept_as(name: str, group: Group) -> str | None:
    """`UpdateRule.kept_as`: the mean of squares is stored as Adam's. If centered, it and the mean stay float32: their
    difference is small compared to the rounding errors of either in few bits."""
    if group["centered"] and name in ("square_avg", "grad_avg"):
        return None
    return "exp_avg_sq" if name == "square_avg" else name


def _element(weight: Any, grad: Any, moments: Mapping[str, Any], o: Any) -> tuple[Any, dict[str, Any]]:
    """w <- w - lr b with b <- momentum b + g / (sqrt(v - m^2) + eps), v and m the decayed means of g^2 and of g; m only
    if centered.

    If rounding makes v - m^2 negative, it counts as 0 here; torch's weights become NaN.

    Source: Tieleman and Hinton 2012, lecture 6.5; Graves 2013, arXiv 1308.0850 for the centered form.
    """
    if o.l2 is not None:
        grad = grad + weight * o.l2
    new = {"square_avg": moments["square_avg"] * o.alpha + grad * grad * (1 - o.alpha)}
    variance = new["square_avg"]
    if o.centered:
        mean = moments["grad_avg"]
        new["grad_avg"] = mean + (grad - mean) * (1 - o.alpha)
        variance = variance - new["grad_avg"] * new["grad_avg"]
        variance = where(variance < 0.0, 0.0, variance)
    direction = grad / (root(variance) + o.eps)
    if o.momentum is not None:
        direction = new["momentum_buffer"] = moments["momentum_buffer"] * o.momentum + direction
    return weight - direction * o.lr, new


def _options(group: Group) -> dict[str, Any]:
    momentum = float(group["momentum"])
    return {
        "lr": learning_rate(group), "l2": float(group["weight_decay"]) or None, "alpha": float(group["alpha"]),
        "eps": float(group["eps"]), "momentum": momentum if momentum > 0 else None, "centered": bool(group["centered"]),
    }  # fmt: skip


rmsprop = elementwise(
    "rmsprop", torch.optim.RMSprop, _moments, _element, _options, refused=REFUSED, kept_as=_kept_as,
    decay=lambda group: (float(group["weight_decay"]), 1.0),
)  # fmt: skip
