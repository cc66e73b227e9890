"""RMSprop: the gradient over the root of its decayed square, in torch.optim.RMSprop's form."""

import torch
from torch import Tensor

from halfstep.optim.rules.base import Group, Moments, UpdateRule


def _moments(group: Group) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))


def _kept_as(name: str, group: Group) -> str | None:
    """The mean of squares is kept as Adam's. Where the mean's square is taken from it, both stay in float32: what is
    left is small beside what rounding would take from either."""
    if group["centered"] and name in ("square_avg", "grad_avg"):
        return None
    return "exp_avg_sq" if name == "square_avg" else name


def _update(weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
    """w <- w - lr b with b <- momentum b + g / (sqrt(v - m^2) + eps), v and m the decayed means of g^2 and of g; m only
    if centered.

    Where rounding leaves v - m^2 below 0, torch's weights become NaN, and here it is 0.

    Source: Tieleman and Hinton 2012, lecture 6.5; Graves 2013, arXiv 1308.0850 for the centered form.
    """
    lr, alpha, momentum = float(group["lr"]), float(group["alpha"]), float(group["momentum"])
    if group.get("maximize"):
        grad = -grad
    if group["weight_decay"]:
        grad = grad + weight * float(group["weight_decay"])
    new = {"square_avg": moments["square_avg"] * alpha + grad * grad * (1 - alpha)}
    variance = new["square_avg"]
    if group["centered"]:
        mean = moments["grad_avg"]
        new["grad_avg"] = mean + (grad - mean) * (1 - alpha)
        variance = (variance - new["grad_avg"] * new["grad_avg"]).clamp(min=0)
    direction = grad / (torch.sqrt(variance) + float(group["eps"]))
    if momentum > 0:
        direction = new["momentum_buffer"] = moments["momentum_buffer"] * momentum + direction
    return weight - direction * lr, new


_REFUSED = {
    "differentiable": "the update runs without autograd",
    "capturable": "the update reads its step count on the host",
}

rmsprop = UpdateRule(
    "rmsprop", torch.optim.RMSprop, _moments, _update, _REFUSED, kept_as=_kept_as,
    decay=lambda group: (float(group["weight_decay"]), 1.0),
)  # fmt: skip
