"""The ideal factors of every operation: what brings its output, and the gradients of its inputs, to unit size.

Inputs, weights and output gradients are taken as independent numbers of N(0, 1), which they are at initialisation. An
output is of unit size where its standard deviation about its mean is 1; a gradient, whose mean is zero, where its root
mean square is. b is the number of rows, m the fan-in, n the fan-out.
"""

from __future__ import annotations

import math
from functools import cache

from halfstep.errors import ModelError
from halfstep.recipe import LinearSpec, Matmul, Multiplier
from halfstep.unit.constraint import Constraint, get_constraint


@cache
def linear(constraint: str | Constraint | None = "to_output", readout: bool = False) -> LinearSpec:
    """The multipliers of a linear layer's products: output m^-1/2, gradient of the input n^-1/2, of the weight and of
    the bias b^-1/2, since each is a sum of so many products. A readout's output has m^-1, which u-muP asks for.

    The constraint ties the first two.

    Source: Blake et al. 2023, table A.2 (the factors); Blake et al. 2025 (the readout).

    >>> print(linear("geometric_mean").output.multiplier, "and", linear().grad_input.multiplier)
    shared^-0.25 columns^-0.25 and columns^-0.5
    """
    output, grad_input = _powers(get_constraint(constraint), 1.0 if readout else 0.5, 0.5)
    return LinearSpec(
        Matmul(multiplier=Multiplier(shared=-output[0], columns=-output[1])),
        Matmul(multiplier=Multiplier(columns=-grad_input[0], shared=-grad_input[1])),
        Matmul(multiplier=Multiplier(shared=-0.5)),
    )


def _powers(constraint: Constraint, fan_in: float, fan_out: float) -> tuple[tuple[float, float], ...]:
    """The powers of 1 / fan-in and 1 / fan-out in each factor, of which the output's has the first and the gradient's
    the second before the rule ties them.

    Raises:
        ModelError: the rule's factors are no products of powers of those it is given.
    """
    first, second = constraint(math.e, 1.0), constraint(1.0, math.e)
    shares = [(math.log(a), math.log(b)) for a, b in zip(first, second, strict=True)]
    expected = [math.exp(2 * a + 3 * b) for a, b in shares]
    found = constraint(math.exp(2), math.exp(3))
    if len(found) != 2 or not all(math.isclose(x, y, rel_tol=1e-9) for x, y in zip(expected, found, strict=True)):
        raise ModelError(
            f"the constraint {getattr(constraint, '__name__', constraint)!r} gives {found} for factors e^2 and e^3; "
            f"expected {tuple(expected)}, products of powers of the two, as a product's factors are of "
            "its sizes. Take geometric_mean, to_output or to_grad_input"
        )
    return tuple((fan_in * a, fan_out * b) for a, b in shares)
