"""Lion: the sign of a momentum, with one moment instead of Adam's two."""

from collections.abc import Mapping
from typing import Any

from halfstep.kernels.arithmetic import where
from halfstep.optim.classes import Lion
from halfstep.optim.rules import Group, learning_rate
from halfstep.optim.rules.elementwise import elementwise


def _element(weight: Any, grad: Any, moments: Mapping[str, Any], o: Any) -> tuple[Any, dict[str, Any]]:
    """w <- (1 - lr decay) w - lr sign(beta1 m + (1 - beta1) g);  m <- beta2 m + (1 - beta2) g.

    Source: Chen et al. 2023, arXiv 2302.06675, program 1.
    """
    momentum = moments["exp_avg"]
    blend = momentum * o.beta1 + grad * (1 - o.beta1)
    rest = blend - blend  # 0, or NaN for an infinity, whose sign would hide it
    direction = where(blend > 0.0, rest + 1.0, where(blend < 0.0, rest - 1.0, rest))
    moved = weight * (1 - o.lr * o.decay) - direction * o.lr
    return moved, {"exp_avg": momentum * o.beta2 + grad * (1 - o.beta2)}


def _options(group: Group) -> dict[str, Any]:
    beta1, beta2 = map(float, group["betas"])
    return {"lr": learning_rate(group), "beta1": beta1, "beta2": beta2, "decay": float(group["weight_decay"])}


lion = elementwise("lion", Lion, lambda group: ("exp_avg",), _element, _options)
