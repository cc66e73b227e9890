"""NAdam: Adam with Nesterov's momentum, in torch.optim.NAdam's form."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from halfstep.kernels.arithmetic import double, root, single, where
from halfstep.optim.rules import REFUSED, Group
from halfstep.optim.rules.adam import decay, options
from halfstep.optim.rules.elementwise import elementwise


MU_PRODUCT = "mu_product"
"""The moment with the product of the momenta of all steps so far: one scalar a weight."""


def _element(weight: Any, grad: Any, moments: Mapping[str, Any], o: Any) -> tuple[Any, dict[str, Any]]:
    """w <- keep w - lr ((1 - mu_t) g / (1 - M_t) + mu_{t+1} m / (1 - M_t mu_{t+1})) / (sqrt(v') + eps), with Adam's m
    and v', mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2), and M_t the product of mu_1 to mu_t.

    Source: Dozat 2016, "Incorporating Nesterov Momentum into Adam"; torch.optim.NAdam for the decays.
    """
    if o.l2 is not None:
        grad = grad + weight * o.l2
    product = where(o.step > 1, moments[MU_PRODUCT], 1.0) * o.mu
    exp_avg = moments["exp_avg"] + (grad - moments["exp_avg"]) * (1 - o.beta1)
    exp_avg_sq = moments["exp_avg_sq"] * o.beta2 + grad * grad * (1 - o.beta2)
    # In float64, since torch computes these with Python floats.
    of_grad = single(o.lr * (1 - o.mu) / (1 - double(product)))
    of_mean = single(o.lr * o.mu_next / (1 - double(product) * o.mu_next))
    ratio = (grad * of_grad + exp_avg * of_mean) / (root(exp_avg_sq) / o.correction + o.eps)
    moved = weight * (1 - o.lr * o.decay) - ratio
    return moved, {MU_PRODUCT: product, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _by_step(step: int, group: Group) -> dict[str, float]:
    beta1, beta2 = map(float, group["betas"])
    decay = float(group["momentum_decay"])
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (number * decay)) for number in (step, step + 1))
    return {"mu": mu, "mu_next": mu_next, "correction": math.sqrt(1 - beta2**step)}


nadam = elementwise(
    "nadam", torch.optim.NAdam, lambda group: (MU_PRODUCT, "exp_avg", "exp_avg_sq"), _element, options, _by_step,
    shape=lambda name, shape: () if name == MU_PRODUCT else shape, refused=REFUSED,
    kept_as=lambda name, group: None if name == MU_PRODUCT else name, decay=decay,
)  # fmt: skip
