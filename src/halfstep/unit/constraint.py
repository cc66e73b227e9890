"""Which of an operation's factors are tied: rules on the factors of the output and of its inputs' gradients; tied ones.

An edge of the graph that is no cut-edge (its removal leaves the graph whole) takes the same constant forward and
backward; else gradients would be no multiple of the true ones. The rules differ in which constant that is.

Source: Blake, Orr and Luschi 2023 (the geometric mean); u-muP, Blake et al. 2025 (the output's).
"""

import math
import warnings
from collections.abc import Callable

from torch import Tensor

from halfstep.errors import ModelError, one_of
from halfstep.quant.memory import has_memory


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
    if name is None or callable(name):
        return name or none
    return _RULES[one_of("constraint", name, _RULES, ModelError)]


_TIED = (
    "unit.{}: the operand of shape {} is broadcast to {:,.0f} copies, and its gradient, their sum, is {:.3g} "
    "times unit size, since the constraint ties it to the other factors. Give constraint=None where this operand is a "
    "parameter, or shares no input with the other; where both are made of one tensor x, give None and make this one "
    "of unit.scale_backward(x, {:.4g}), so that x's gradient stays the true one times a constant"
)


def tied(
    name: str,
    constraint: str | Constraint | None,
    ideal: tuple[float, float, float],
    operands: tuple[Tensor, Tensor],
    roots: tuple[float, float],
) -> tuple[float, float, float]:
    """The factors of the output and of both gradients under a constraint.

    The gradient of an operand that is broadcast is a sum over its copies: its ideal factor is smaller by their number's
    root, and a constraint gives it that of the others. From four copies on a warning says so, where its gradient
    becomes twice unit size or more.

    Args:
        name: of the function, which warns at its caller.
        ideal: of the output and both gradients, each of unit size by itself.
        roots: copies^-1/2 of each operand.
    """
    output, *grads = get_constraint(constraint)(*ideal)
    for i, (operand, root, wanted, given) in enumerate(zip(operands, roots, ideal[1:], grads, strict=True)):
        if root <= 0.5 and given >= 2 * wanted and operand.requires_grad and has_memory(operand):
            shape, copies = tuple(operand.shape), root**-2
            warnings.warn(_TIED.format(name, shape, copies, given / wanted, ideal[2 - i] / wanted), stacklevel=3)
    return output, grads[0], grads[1]
