"""The ideal factors of every operation, which bring its output and the gradients of its inputs to unit size.

Inputs, weights and output gradients are assumed to be independent samples of N(0, 1), as at initialization. An output
has unit size if its standard deviation is 1; a gradient, whose mean is zero, if its root mean square is 1. b is the
number of rows, m the fan-in, n the fan-out.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.constant import constant
from halfstep.errors import ModelError, one_of
from halfstep.recipe import LinearSpec, Matmul, Multiplier
from halfstep.unit.calibration import RULES, Constraint, get_constraint


Array = NDArray[np.float64]
_Z: Array = np.linspace(-14.0, 14.0, 1401)
_WEIGHTS: Array = np.exp(-_Z * _Z / 2) * 0.02 / math.sqrt(2 * math.pi)
_STEP = 0.1  # of log t


def expectation(function: Callable[[Array], Any]) -> float:
    """E[f(z)] of a smooth function for z from N(0, 1), by a sum over an even grid, which is exact within rounding.

    >>> round(expectation(lambda z: z**4), 12)
    3.0
    """
    return float(_WEIGHTS @ function(_Z))


class Softmax:
    """Moments of p = softmax(m z) over s independent z from N(0, 1), for any s, and of its gradient.

    They are integrated numerically, exact to ten digits. Softmax divides by a random sum S of s exponentials. 1 / S^k
    is the integral of t^(k-1) e^(-t S) over t from 0 to infinity, divided by Gamma(k), and the expectation of e^(-t S)
    is a product of s equal factors.
    """

    def __init__(self, spread: float, longest: int) -> None:
        """Prepare the integrals for logits with the standard deviation `spread`, at most `longest` of them."""
        lowest, highest = -math.log(longest) - 9 * spread - 14, 10 * spread + 6
        log_t = np.arange(lowest, highest, _STEP)
        t, exponentials = np.exp(log_t), np.exp(spread * _Z)
        lost = -np.expm1(-t[:, None] * exponentials)
        self.t: Array = t
        self.missing: Array = lost @ _WEIGHTS  # 1 - E[e^(-t e^(m z))]
        self.powers: list[Array] = [(1 - lost) @ (_WEIGHTS * exponentials**k) for k in range(5)]

    def _integral(self, k: int, terms: Array) -> float:
        return float(np.sum(self.t**k * terms)) * _STEP / math.gamma(k)

    def _others(self, count: int) -> Array:
        return np.exp(count * np.log1p(-np.minimum(self.missing, 1 - 1e-16)))  # type: ignore[no-any-return]

    def moment(self, k: int, size: int) -> float:
        """E[p_1^k] for a softmax over `size` elements."""
        return self._integral(k, self.powers[k] * self._others(size - 1))

    def gradient(self, size: int) -> float:
        """The mean square of the gradient for g from N(0, 1): E[(p_1 (g_1 - sum_j p_j g_j))^2] = E[p_1^2 (1 - 2 p_1 +
        sum_j p_j^2)]."""
        both = self._integral(4, self.powers[2] ** 2 * self._others(size - 2))
        return self.moment(2, size) - 2 * self.moment(3, size) + self.moment(4, size) + (size - 1) * both

    def squares(self, size: int) -> float:
        """E[sum_j p_j^2] for a softmax over `size`: the variance of a weighted sum of values from N(0, 1)."""
        return size * self.moment(2, size)

    def squares_up_to(self, size: int) -> float:
        """The sum of `squares` over 1, 2, ..., size: sum_k k r^(k-1) = (1 - r^n (1 + n a)) / a^2 with r = 1 - a."""
        a = self.missing
        small = size * a < 1e-4
        safe = np.where(small, 1.0, a)
        sums = np.where(small, size * (size + 1) / 2, (1 - self._others(size) * (1 + size * a)) / safe**2)
        return self._integral(2, self.powers[2] * sums)


__all__ = [
    "activation", "add", "attention", "broadcast", "cross_entropy", "dropout", "embedding", "gated_silu", "linear",
    "matmul", "mse_loss", "norm", "residual", "softmax",
]  # fmt: skip


def linear(constraint: str | Constraint | None = "to_output", readout: bool = False) -> LinearSpec:
    """The multipliers of a linear layer's matmuls: m^-1/2 for the output, n^-1/2 for the input's gradient, b^-1/2 for
    the gradients of weight and bias: each is a sum of that many products. A readout's output has m^-1, as in u-muP.

    The constraint ties the first two.

    Source: Blake et al. 2023, table A.2 (the factors); Blake et al. 2025 (the readout).

    >>> print(linear("geometric_mean").output.multiplier, "and", linear().grad_input.multiplier)
    shared^-0.25 columns^-0.25 and columns^-0.5
    """
    known = _LINEAR.get((constraint or "none", readout)) if not callable(constraint) else None
    return _linear(get_constraint(constraint), readout) if known is None else known


def _linear(constraint: Constraint, readout: bool) -> LinearSpec:
    output, grad_input = _powers(constraint, 1.0 if readout else 0.5, 0.5)
    return LinearSpec(
        Matmul(multiplier=Multiplier(shared=-output[0], columns=-output[1])),
        Matmul(multiplier=Multiplier(columns=-grad_input[0], shared=-grad_input[1])),
        Matmul(multiplier=Multiplier(shared=-0.5)),
    )


def _powers(constraint: Constraint, fan_in: float, fan_out: float) -> tuple[tuple[float, float], ...]:
    """The powers of 1 / fan-in and 1 / fan-out in each factor after the constraint. Before it, the output's factor is
    the power `fan_in` of 1 / fan-in, and the gradient's the power `fan_out` of 1 / fan-out.

    Raises:
        ModelError: the constraint's results are not products of powers of its arguments.
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


_LINEAR = {(rule.__name__, readout): _linear(rule, readout) for rule in RULES for readout in (False, True)}
"""The specs for the named constraints, made once, so that they exist in a traced model."""


def matmul(rows: float, shared: float, columns: float, copies: float = 1.0) -> tuple[float, float, float]:
    """The factors of (rows, shared) x (shared, columns): output shared^-1/2, left gradient columns^-1/2, right gradient
    rows^-1/2.

    Args:
        copies: the number of matmuls that share the right operand, whose gradient is summed over them.
    """
    return max(shared, 1) ** -0.5, max(columns, 1) ** -0.5, max(rows * copies, 1) ** -0.5


@constant
def softmax(size: int, mult: float = 1.0) -> tuple[float, float]:
    """The factors of softmax(mult x) over `size` elements, 1 / std(p), and of its gradient, 1 / rms(dx), integrated.

    The table of Blake et al. 2023 has `size` for both, the order of magnitude; for many elements and mult 1 they are
    size / sqrt(e - 1) and size / sqrt(e). Over one element softmax is constant: 1 and 1.

    >>> [round(factor / 1000, 3) for factor in softmax(1000)]
    [0.767, 0.612]
    """
    _check_spread("softmax", mult)
    if size < 2:
        return 1.0, 1.0
    moments = Softmax(mult, size)
    return (moments.moment(2, size) - size**-2) ** -0.5, 1 / (mult * moments.gradient(size) ** 0.5)


@constant
def attention(
    queries: int, keys: int, width: int, mult: float = 1.0, is_causal: bool = False, dropout: float = 0.0
) -> float:
    """The one factor of softmax(mult q k^T / width) v, for its output and the gradients of q, k and v.

    The output's variance for values from N(0, 1) is E[sum p^2] / (1 - dropout), for logits with the standard deviation
    mult / sqrt(width), assumed to be normal. Causal attention sums i values at position i, and the factor is for the
    variance averaged over positions: no constant gives each of them unit size, and the first has the largest variance.

    For flat logits the variance is 1 / keys, and causal H(keys) / keys with the harmonic number H, for which the
    library has the logarithm.

    >>> round(attention(256, 256, 64), 2), round(attention(256, 256, 64, is_causal=True), 2)
    (15.88, 6.43)
    """
    spread = mult / max(width, 1) ** 0.5
    _check_spread("attention", spread)
    if not 0 <= dropout < 1 or keys < 1 or queries < 1:
        return 1.0
    moments = Softmax(spread, keys)
    if not is_causal:
        variance = moments.squares(keys)
    else:
        below = min(queries, keys)
        variance = (moments.squares_up_to(below) + (queries - below) * moments.squares(keys)) / queries
    return float(((1 - dropout) / variance) ** 0.5)


def _check_spread(name: str, spread: float) -> None:
    if not 1e-3 <= spread <= 10:
        raise ModelError(
            f"{name} of logits whose standard deviation would be {spread:g}; expected between 0.001 and 10: below, all "
            "weights are alike, and above, one of them is 1. Take another mult"
        )


def embedding(rows: int, lookups: int) -> float:
    """The factor of the gradient of a table with `rows` rows: sqrt(rows / lookups), since a row is looked up lookups /
    rows times.

    The row `padding_idx` has no gradient; it does not change the factor.
    """
    return math.sqrt(max(rows, 1) / max(lookups, 1))


def norm(rows: int) -> float:
    """The factor of the gradients of a norm's weight and bias: rows^-1/2. The output and the input's gradient have unit
    size already."""
    return 1 / math.sqrt(max(rows, 1))


def dropout(p: float) -> float:
    """The factor of dropout's output and gradient: sqrt(1 - p), since torch divides kept elements by 1 - p."""
    if not 0 <= p <= 1:
        raise ModelError(f"dropout with p = {p}; expected a probability between 0 and 1")
    return math.sqrt(1 - p)


def add(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[float, float, float]:
    """The factors of a sum of tensors of these shapes: 2^-1/2 for the output, copies^-1/2 for the gradient of an
    operand that is broadcast to that many copies. If one has a single element, the output's is 1, since a shift does
    not change the standard deviation.
    """
    one, other = broadcast(first, second)
    output = 1.0 if 1 in (math.prod(first), math.prod(second)) and one != other else 2**-0.5
    return output, one, other


def broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[float, float]:
    """The factors of the gradients of two operands that are broadcast together: copies^-1/2, since the gradient of an
    element is the sum over its copies.

    >>> broadcast((8, 32, 16, 16), (8, 32, 1, 1))
    (1.0, 0.0625)
    """
    whole = math.prod(_broadcast(first, second))
    one, other = (max(whole / max(math.prod(shape), 1), 1) ** -0.5 for shape in (first, second))
    return one, other


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> list[int]:
    dims = max(len(first), len(second))
    padded = [(1,) * (dims - len(shape)) + tuple(shape) for shape in (first, second)]
    return [b if a == 1 else a for a, b in zip(*padded, strict=True)]


def residual(variance_fraction: float | None = None, ratio: float | None = None) -> tuple[float, float]:
    """The weights of branch and skip connection, whose squares add up to 1.

    Args:
        variance_fraction: tau of the 2023 paper and of munit scaling: sqrt(tau) branch + sqrt(1 - tau) skip.
        ratio: tau of u-muP, a ratio of standard deviations: (tau branch + skip) / sqrt(1 + tau^2).

    Raises:
        ModelError: both or none are given, or the value is out of range.
    """
    if (variance_fraction is None) == (ratio is None):
        raise ModelError(
            f"variance_fraction = {variance_fraction} and ratio = {ratio} of a residual; expected one of them: "
            "variance_fraction = 0.5 and ratio = 1 both weigh branch and skip alike"
        )
    if ratio is not None:
        if not 0 <= ratio < math.inf:
            raise ModelError(f"ratio = {ratio} of a residual; expected a finite number that is not negative")
        whole = math.hypot(1.0, ratio)
        return ratio / whole, 1 / whole
    assert variance_fraction is not None
    if not 0 <= variance_fraction <= 1:
        raise ModelError(f"variance_fraction = {variance_fraction} of a residual; expected a number from 0 to 1")
    return variance_fraction**0.5, (1 - variance_fraction) ** 0.5


def cross_entropy(classes: int, label_smoothing: float = 0.0) -> float:
    """The factor of the logits' gradient for a summed loss: classes / sqrt(classes - 1) / (1 - label_smoothing).

    It is the inverse of the root mean square of the gradient at equal logits, 1 / classes - target.

    Raises:
        ModelError: one class, or label_smoothing of 1, for which the gradient is zero.
    """
    if classes < 2 or not 0 <= label_smoothing < 1:
        raise ModelError(
            f"cross-entropy over {classes} classes with label_smoothing = {label_smoothing}, whose gradient is zero or "
            "nothing; expected two classes or more, and a smoothing from 0 up to but not 1"
        )
    return classes / math.sqrt(classes - 1) / (1 - label_smoothing)


def mse_loss() -> float:
    """The factor of the gradients of input and target for a summed loss: 8^-1/2, since 2 (x - t) has the deviation
    sqrt(8)."""
    return 8**-0.5


def _sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def _normal(z: Array) -> Array:
    """The cumulative distribution function of N(0, 1)."""
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

    For relu, with any mult: sqrt(2 / (1 - 1 / pi)) and sqrt(2), since E[relu] = 1 / sqrt(2 pi) and E[relu^2] = 1 / 2.

    Source: Blake et al. 2023; their measured constants agree to a thousandth.

    >>> [round(factor, 3) for factor in activation("gelu")]
    [1.701, 1.481]
    """
    if not 0 < mult < math.inf:
        raise ModelError(f"mult = {mult} of {name}; expected a positive number: 1 for the function itself")
    if name == "relu":
        return math.sqrt(2 / (1 - 1 / math.pi)), math.sqrt(2)
    one_of("activation", name, [*_FUNCTIONS, "relu"], ModelError)
    mean, square, slope = _moments(name, mult)
    return mult / math.sqrt(square - mean * mean), 1 / math.sqrt(slope)


@constant
def gated_silu(mult: float = 1.0) -> tuple[float, float, float]:
    """The factors of x silu(mult gate) / mult, of the gradient of x and of that of the gate.

    The first two are mult / rms(silu), since x has mean zero; the gate's is 1 / rms(silu'), which the official library
    uses for all three.
    """
    activation("silu", mult)  # checks mult
    _, square, slope = _moments("silu", mult)
    return mult / math.sqrt(square), mult / math.sqrt(square), 1 / math.sqrt(slope)


def _moments(name: str, mult: float) -> tuple[float, float, float]:
    """E[f(mult z)], E[f(mult z)^2] and E[f'(mult z)^2] for z from N(0, 1)."""
    function, slope = _FUNCTIONS[name]
    return (
        expectation(lambda z: function(mult * z)),
        expectation(lambda z: function(mult * z) ** 2),
        expectation(lambda z: slope(mult * z) ** 2),
    )
