"""LAMB: AdamW whose step is scaled, for each tensor, by the ratio of the weight's norm to the step's."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from halfstep.kernels.arithmetic import norm, root, where
from halfstep.optim.classes import Lamb
from halfstep.optim.rules.adam import by_step, options
from halfstep.optim.rules.elementwise import elementwise


def _element(weight: Any, grad: Any, moments: Mapping[str, Any], o: Any) -> tuple[Any, dict[str, Any]]:
    """w <- w - lr (|w| / |r|) r with r = m' / (sqrt(v') + eps) + decay w and Adam's corrected moments m', v'.

    The ratio is 1 where either norm is 0.

    Source: You et al. 2019, arXiv 1904.00962, algorithm 2.
    """
    exp_avg = moments["exp_avg"] * o.beta1 + grad * (1 - o.beta1)
    exp_avg_sq = moments["exp_avg_sq"] * o.beta2 + grad * grad * (1 - o.beta2)
    ratio = exp_avg / (root(exp_avg_sq) * (o.rescale * o.correction) + o.eps * o.correction)
    direction = ratio + weight * o.decay
    size, length = norm(weight), norm(direction)
    trust = where(size > 0.0, where(length > 0.0, size / length, 1.0), 1.0)
    return weight - direction * (trust * o.lr), {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


lamb = elementwise(
    "lamb",
    Lamb,
    lambda group: ("exp_avg", "exp_avg_sq"),
    _element,
    partial(options, decoupled=True),
    by_step,
    elementwise=False,
)
