"""The factors of activation functions: one number in, one number out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from halfstep.errors import ModelError, unknown
from halfstep.unit.constant import constant
from halfstep.unit.expectation import Array, expectation


def _sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def _normal(z: Array) -> Array:
    """The distribution function of N(0, 1)."""
    return np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z])


def _tanh_of_gelu(z: Array) -> Array:
    return np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))


_FUNCTIONS: dict[str, tuple[Callable[[Array], Any], Callable[[Array], Any]]] = {
    "gelu": (lambda z: z * _normal(z), lambda z: _normal(z) + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)),
    "gelu_tanh": (
        lambda z: z * (1 + _tanh_of_gelu(z)) / 2,
        lambda z: (
            (1 + _tanh_of_gelu(z)) / 2
            + z * (1 - _tanh_of_gelu(z) ** 2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2) / 2
        ),
    ),
    "silu": (lambda z: z * _sigmoid(z), lambda z: _sigmoid(z) * (1 + z * (1 - _sigmoid(z)))),
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "sigmoid": (_sigmoid, lambda z: _sigmoid(z) * (1 - _sigmoid(z))),
}


@constant
def activation(name: str, mult: float = 1.0) -> tuple[float, float]:
    """The factors of f(mult x) / mult and of its gradient: mult / std(f(mult z)) and 1 / rms(f'(mult z)), integrated.

    relu's, whatever mult: sqrt(2 / (1 - 1 / pi)) and sqrt(2), since E[relu] = 1 / sqrt(2 pi) and E[relu^2] = 1 / 2.

    Source: Blake et al. 2023, whose measured constants these are to within a thousandth.

    >>> [round(factor, 3) for factor in activation("gelu")]
    [1.701, 1.481]
    """
    if not 0 < mult < math.inf:
        raise ModelError(f"mult = {mult} of {name}; expected a positive number: 1 for the function itself")
    if name == "relu":
        return math.sqrt(2 / (1 - 1 / math.pi)), math.sqrt(2)
    if name not in _FUNCTIONS:
        raise ModelError(unknown("activation", name, [*_FUNCTIONS, "relu"]))
    mean, square, slope = _moments(name, mult)
    return mult / math.sqrt(square - mean * mean), 1 / math.sqrt(slope)


@constant
def gated_silu(mult: float = 1.0) -> tuple[float, float, float]:
    """The factors of x silu(mult gate) / mult, of x's gradient and of the gate's.

    The first two are 1 / rms(silu), since x has no mean; the gate's 1 / rms(silu'), which the library takes for all.
    """
    activation("silu", mult)  # which says what is wrong with mult
    _, square, slope = _moments("silu", mult)
    return mult / math.sqrt(square), mult / math.sqrt(square), 1 / math.sqrt(slope)


def _moments(name: str, mult: float) -> tuple[float, float, float]:
    """E[f], E[f^2] and E[f'^2] at mult z."""
    function, slope = _FUNCTIONS[name]
    return (
        expectation(lambda z: function(mult * z)),
        expectation(lambda z: function(mult * z) ** 2),
        expectation(lambda z: slope(mult * z) ** 2),
    )
