"""NAdam: Adam with Nesterov's momentum, in torch.optim.NAdam's form."""

import math

import torch
from torch import Tensor

from halfstep.optim.rules.base import Group, Moments, UpdateRule


MU_PRODUCT = "mu_product"
"""The product of the momenta of all steps so far: one number a weight."""


def _kept_as(name: str, group: Group) -> str | None:
    return None if name == MU_PRODUCT else name


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return () if name == MU_PRODUCT else shape


def _decay(group: Group) -> tuple[float, float]:
    decay = float(group["weight_decay"])
    return (0.0, 1 - float(group["lr"]) * decay) if group["decoupled_weight_decay"] else (decay, 1.0)


def _update(weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
    """w <- keep w - lr ((1 - mu_t) g / (1 - M_t) + mu_{t+1} m / (1 - M_t mu_{t+1})) / (sqrt(v') + eps), with Adam's m
    and v', mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2), and M_t the product of mu_1 to mu_t.

    Source: Dozat 2016, "Incorporating Nesterov Momentum into Adam"; torch.optim.NAdam for the decays.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay = float(group["lr"]), float(group["momentum_decay"])
    l2, keep = _decay(group)
    if group.get("maximize"):
        grad = -grad
    if l2:
        grad = grad + weight * l2
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (number * decay)) for number in (step, step + 1))
    product = (moments[MU_PRODUCT] if step > 1 else torch.ones_like(moments[MU_PRODUCT])) * mu
    exp_avg = moments["exp_avg"] + (grad - moments["exp_avg"]) * (1 - beta1)
    exp_avg_sq = moments["exp_avg_sq"] * beta2 + grad * grad * (1 - beta2)
    root = torch.sqrt(exp_avg_sq) / math.sqrt(1 - beta2**step) + float(group["eps"])
    # Of the product in float64, as torch's are Python's numbers; tensors, so that no device waits for the host.
    of_grad = (lr * (1 - mu) / (1 - product.double())).float()
    of_mean = (lr * mu_next / (1 - product.double() * mu_next)).float()
    moved = weight * keep - (grad * of_grad + exp_avg * of_mean) / root
    return moved, {MU_PRODUCT: product, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


_REFUSED = {
    "differentiable": "the update runs without autograd",
    "capturable": "the update reads its step count on the host",
}

nadam = UpdateRule(
    "nadam", torch.optim.NAdam, lambda group: (MU_PRODUCT, "exp_avg", "exp_avg_sq"), _update, _REFUSED,
    kept_as=_kept_as, shape=_shape, decay=_decay,
)  # fmt: skip
