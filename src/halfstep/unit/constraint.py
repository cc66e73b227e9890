"""Which of an operation's factors are tied: rules on the factor of the output and those of the gradients of its inputs.

An edge of the graph that is no cut-edge (its removal leaves the graph whole) takes the same constant forward and
backward; else gradients would be no multiple of the true ones. The rules differ in which constant that is.

Source: Blake, Orr and Luschi 2023 (the geometric mean); u-muP, Blake et al. 2025 (the output's).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from halfstep.errors import ModelError, unknown


Constraint = Callable[..., tuple[float, ...]]
"""(output, *grad_inputs) to as many factors."""


def none(output: float, *grad_inputs: float) -> tuple[float, ...]:
    """Each its own: for what comes after the last residual addition, and for weights, always.

    >>> none(0.5, 2.0)
    (0.5, 2.0)
    """
    return (output, *grad_inputs)


def geometric_mean(output: float, *grad_inputs: float) -> tuple[float, ...]:
    """The geometric mean of all: neither pass is of unit size, both miss it by the same ratio.

    >>> geometric_mean(0.5, 2.0)
    (1.0, 1.0)
    """
    factors = (output, *grad_inputs)
    return (math.prod(factors) ** (1 / len(factors)),) * len(factors)


def to_output(output: float, *grad_inputs: float) -> tuple[float, ...]:
    """The output's: values are of unit size, and gradients are what they are.

    >>> to_output(0.5, 2.0)
    (0.5, 0.5)
    """
    return (output,) * (1 + len(grad_inputs))


def to_grad_input(output: float, *grad_inputs: float) -> tuple[float, ...]:
    """The geometric mean of the gradients' (where there is one, its own): they are of unit size.

    >>> to_grad_input(0.5, 2.0)
    (2.0, 2.0)
    """
    return (math.prod(grad_inputs) ** (1 / max(len(grad_inputs), 1)),) * (1 + len(grad_inputs))


RULES = none, geometric_mean, to_output, to_grad_input
_RULES: dict[str, Constraint] = {rule.__name__: rule for rule in RULES}


def get_constraint(name: str | Constraint | None) -> Constraint:
    """The rule of that name (`none`, `geometric_mean`, `to_output`, `to_grad_input`); None is `none`; a rule is itself.

    Raises:
        ModelError: no rule has that name; the nearest ones are shown.
    """
    if name is None:
        return none
    if callable(name):
        return name
    if name not in _RULES:
        raise ModelError(unknown("constraint", name, _RULES))
    return _RULES[name]
