"""Scaling laws for precision: the loss from parameters, tokens and bits; published constants and fits. No torch.

The law of Kumar et al. 2024 (arXiv 2411.04330): fewer bits act like fewer parameters, and quantising adds a term.

    L(N, D, P) = A N_eff^-a + B D^-b + E + damage        N_eff = N * prod over parts x of (1 - exp(-P_x / g_x + n_x))
    damage(N, D, P) = C D^gD / N^gN exp(-P / g + n)      for a model trained in 16 bits whose weights are then rounded

N parameters, D tokens, P bits; L in nats a token. Equations 2, 4 and 11, with the offsets n of appendix K, which the
main text leaves out: without them the constants give 3.7 bits as the best width, with them the paper's 7 to 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.errors import LawError, one_of


__all__ = ["KUMAR", "PARTS", "Cell", "Damage", "Fitted", "Law", "PostTraining", "Width", "fit_damage", "fit_loss"]

PARTS = ("weights", "activations", "kv")
"""The parts of a model whose bits the published law tells apart."""
_WIDEST = 16.0
"""Bits beyond which a part is taken for unrounded."""


@dataclass(frozen=True)
class Width:
    """What one part's bits do: the share 1 - exp(-P / gamma + offset) of the parameters stays effective."""

    gamma: float
    offset: float = 0.0

    def share(self, bits: float) -> float:
        """The share that stays effective: 0 where the law has none left.

        >>> round(Width(2.6745, 0.3037).share(8), 2)
        0.93
        """
        return max(0.0, -math.expm1(-bits / self.gamma + self.offset))


@dataclass(frozen=True)
class PostTraining:
    """What rounding a trained model's weights adds to its loss: C D^gD / N^gN exp(-P / gamma + offset)."""

    scale: float
    tokens: float
    """The exponent of D."""
    parameters: float
    """The exponent of N, in the denominator."""
    gamma: float
    offset: float = 0.0

    def damage(self, parameters: float, tokens: float, bits: float) -> float:
        """The loss that rounding to so many bits adds, in nats a token."""
        decay = math.exp(-bits / self.gamma + self.offset)
        return self.scale * math.pow(tokens, self.tokens) / math.pow(parameters, self.parameters) * decay


@dataclass(frozen=True)
class Law:
    """The constants of the law. N and D are raw counts.

    Raises:
        LawError: of a method, for a number that is not positive, or a part that the law has no width for.
    """

    a_scale: float
    a: float
    b_scale: float
    b: float
    floor: float
    widths: Mapping[str, Width]
    post: PostTraining | None = None
    source: str = ""

    def without_offsets(self) -> Law:
        """The form of the main text (equation 4), with the same constants."""
        widths = {part: replace(width, offset=0.0) for part, width in self.widths.items()}
        return replace(self, widths=widths, post=self.post and replace(self.post, offset=0.0))

    def share(self, bits: Mapping[str, float]) -> float:
        """The share of the parameters that stays effective, with so many bits a part; parts left out are whole.

        Raises:
            LawError: a part that the law does not know, or bits that are not positive.
        """
        for part, width in bits.items():
            one_of("part", part, self.widths, LawError)
            _positive(f"bits of {part}", width)
        return math.prod(self.widths[part].share(width) for part, width in bits.items())

    def loss(
        self, parameters: float, tokens: float, bits: Mapping[str, float] | None = None, post: float | None = None
    ) -> float:
        """The loss after training, in nats a token; infinite where no parameter stays effective.

        Args:
            post: bits that the weights of the model, trained in 16 bits, are then rounded to.

        >>> round(KUMAR.loss(220e6, 26e9), 2)
        3.2
        """
        _positive("parameters", parameters)
        _positive("tokens", tokens)
        effective = parameters * self.share(bits or {})
        if not effective:
            return math.inf
        sized, fed = self.a_scale * math.pow(effective, -self.a), self.b_scale * math.pow(tokens, -self.b)
        trained = sized + fed + self.floor
        return trained if post is None else trained + self.damage(parameters, tokens, post)

    def damage(self, parameters: float, tokens: float, bits: float) -> float:
        """The loss that rounding the weights after training adds.

        >>> round(KUMAR.damage(30e6, 26e9, 3), 3)
        0.586
        """
        _positive("bits after training", bits)
        return self._post().damage(parameters, tokens, bits)

    def harmful_tokens(self, parameters: float, bits: float) -> float:
        """The tokens beyond which more of them make the loss after rounding to so many bits worse (equation 13)."""
        post = self._post()
        _positive("parameters", parameters)
        _positive("bits after training", bits)
        decay = math.exp(bits / post.gamma - post.offset)
        numerator = self.b * self.b_scale * math.pow(parameters, post.parameters) * decay
        return math.pow(numerator / (post.tokens * post.scale), 1 / (post.tokens + self.b))

    def best_bits(self) -> float:
        """The bits, the same for all parts, at which a compute budget reaches the lowest loss, N and D free.

        With a = b and a cost of (6 / 16) N D P it minimises P / share(P), whatever the budget, A, B, E and a. A law
        whose a and b differ has no such width; theirs is `best_bits_for`.

        Raises:
            LawError: a and b differ.

        >>> round(KUMAR.best_bits(), 2), round(KUMAR.without_offsets().best_bits(), 2)
        (7.0, 3.47)
        """
        if not math.isclose(self.a, self.b):
            raise LawError(f"a = {self.a:g} and b = {self.b:g} differ: the best bits depend on the compute; give it")
        return _lowest(lambda bits: bits / max(self.share(dict.fromkeys(self.widths, bits)), 1e-300))

    def best_for(self, compute: float) -> tuple[float, float, float]:
        """The bits, parameters and tokens that reach the lowest loss with so many floating point operations.

        The cost is (6 / 16) N D P: bits of 16 cost what they cost today, fewer in proportion.
        """
        _positive("compute", compute)

        def sized(bits: float) -> tuple[float, float]:
            share, product = self.share(dict.fromkeys(self.widths, bits)), compute * 16 / 6 / bits
            if not share:
                return math.inf, math.nan
            # The minimum over N of A' N^-a + B (product / N)^-b, in closed form.
            ratio = self.a * self.a_scale * math.pow(share, -self.a) / (self.b * self.b_scale)
            parameters = math.pow(ratio * math.pow(product, self.b), 1 / (self.a + self.b))
            return self.loss(parameters, product / parameters, dict.fromkeys(self.widths, bits)), parameters

        bits = _lowest(lambda width: sized(width)[0])
        parameters = sized(bits)[1]
        return bits, parameters, compute * 16 / 6 / bits / parameters

    def _post(self) -> PostTraining:
        if self.post is None:
            raise LawError("this law has no term for rounding after training; fit one on a sweep with damage measured")
        return self.post


KUMAR = Law(
    a_scale=4.299e3,
    a=0.4965,
    b_scale=1.806e4,
    b=0.4965,
    floor=2.7648,
    widths={
        "weights": Width(2.6745, 0.3037),
        "activations": Width(2.2102, 1.4072),
        "kv": Width(0.9578, 2.4185),
    },
    post=PostTraining(scale=0.0598, tokens=0.5068, parameters=0.3439, gamma=0.5907, offset=1.1277),
    source="Kumar et al. 2024, arXiv 2411.04330, appendix K, table 2: integers, 30M to 220M parameters",
)
"""The published constants; the authors call them not portable."""


def _positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise LawError(f"{what} = {value:g}; expected a positive number")


def _lowest(function: Callable[[float], float], low: float = 0.5, high: float = 3 * _WIDEST) -> float:
    """Where a function of the bits that has one valley is lowest: a scan, then golden sections."""
    grid = [low + (high - low) * i / 400 for i in range(401)]
    place = min(range(401), key=lambda i: function(grid[i]))
    left, right = grid[max(0, place - 1)], grid[min(400, place + 1)]
    golden = (math.sqrt(5) - 1) / 2
    while right - left > 1e-6:
        first, second = right - golden * (right - left), left + golden * (right - left)
        left, right = (left, second) if function(first) < function(second) else (first, right)
    return (left + right) / 2


Numbers = NDArray[np.float64]
RESAMPLES = 200
_LEAST = 3
"""Values of each axis that a fit needs."""
_LEAST_SHARE = 0.01
"""What the share of effective parameters must change by from the fewest bits to the most."""


@dataclass(frozen=True)
class Cell:
    """One run: its parameters, tokens, bits of the weights while it trained (None: whole), and final loss."""

    parameters: float
    tokens: float
    bits: float | None
    loss: float


@dataclass(frozen=True)
class Damage:
    """A trained model rounded: its parameters and tokens, the bits, and the loss that rounding added."""

    parameters: float
    tokens: float
    bits: float
    damage: float


@dataclass(frozen=True)
class Fitted:
    """Constants by name, each with the ends of its 95% interval, and how well they fit."""

    constants: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    r2: float
    cells: int
    residual: float
    """The root mean square of loss - law for losses, of its logarithm's for damage."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.constants,
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "r2": self.r2,
            "cells": self.cells,
            "residual": self.residual,
        }

    def law(self, damage: Fitted | None = None) -> Law:
        """The law with these constants, as fitted on losses; with the term of `damage`."""
        c, d = self.constants, damage and damage.constants
        widths = {"weights": Width(c["gamma"], c["offset"])} if "gamma" in c else {}
        post = d and PostTraining(d["scale"], d["tokens"], d["parameters"], d["gamma"])
        return Law(c["a_scale"], c["a"], c["b_scale"], c["b"], c["floor"], widths, post or None, f"{self.cells} runs")


def fit_loss(cells: Sequence[Cell], resamples: int = RESAMPLES) -> Fitted:
    """A, a, B, b, E, and gamma and offset of the weights' bits where runs differ in them, by least squares.

    The intervals are of the runs drawn again with replacement.

    Raises:
        LawError: fewer than 3 sizes, amounts of tokens, or (where any run has bits) widths; it says what is there. The
            bits make no difference that these runs show.
    """
    rounded = any(cell.bits is not None for cell in cells)
    _enough(cells, ("parameters", "tokens", *(["bits"] if rounded else [])))
    n, d, bits, loss = (
        np.array([math.inf if v is None else v for v in column], dtype=np.float64)
        for column in zip(*((c.parameters, c.tokens, c.bits, c.loss) for c in cells), strict=True)
    )
    centre_n, centre_d = math.exp(np.log(n).mean()), math.exp(np.log(d).mean())

    def predicted(p: Numbers, n: Numbers, d: Numbers, bits: Numbers) -> Numbers:
        share = -np.expm1(np.minimum(-bits * np.exp(p[5]) + p[6], -1e-6)) if rounded else 1.0
        return (  # type: ignore[no-any-return]
            np.exp(p[0]) * (n * share / centre_n) ** -np.exp(p[1])
            + np.exp(p[2]) * (d / centre_d) ** -np.exp(p[3])
            + p[4]
        )

    start = [math.log(0.3), math.log(0.4), math.log(0.3), math.log(0.4), float(loss.min()) - 0.3]
    starts = [[*start, math.log(1 / gamma), 0.3] if rounded else start for gamma in (1.0, 2.5)]

    def constants(p: Numbers) -> dict[str, float]:
        a, b = math.exp(p[1]), math.exp(p[3])
        found = {"a_scale": math.exp(p[0]) * centre_n**a, "a": a, "b_scale": math.exp(p[2]) * centre_d**b, "b": b}
        return found | {"floor": float(p[4])} | ({"gamma": math.exp(-p[5]), "offset": float(p[6])} if rounded else {})

    found = _fitted(predicted, starts, (n, d, bits), loss, constants, resamples)
    if rounded:
        _differs(found, float(bits.min()), float(bits[np.isfinite(bits)].max()))
    return found


def _differs(found: Fitted, fewest: float, most: float) -> None:
    """Refuse a fit in which the bits change nothing: its gamma is any large number."""
    low, high = (Width(found.constants["gamma"], found.constants["offset"]).share(bits) for bits in (fewest, most))
    if high - low < _LEAST_SHARE:
        raise LawError(
            f"the bits make no difference that these {found.cells} runs show: between {fewest:g} and {most:g} of them "
            f"the share of effective parameters goes from {low:.3f} to {high:.3f}. Train longer, or in fewer bits; or "
            "fit the runs whose weights are whole"
        )


def fit_damage(cells: Sequence[Damage], resamples: int = RESAMPLES) -> Fitted:
    """C, gD, gN and gamma of the damage, by least squares of its logarithm; offset and C are one constant here.

    Raises:
        LawError: as `fit_loss`; or a damage that is not positive, which has no logarithm: rounding did no harm there.
    """
    _enough(cells, ("parameters", "tokens", "bits"))
    if none := [cell for cell in cells if not cell.damage > 0]:
        raise LawError(
            f"{len(none)} of {len(cells)} damages are not positive, the first {none[0]}: no harm that can be told from "
            "noise. Leave them out, or round to fewer bits"
        )
    n, d, bits, damage = (
        np.array(column, dtype=np.float64)
        for column in zip(*((c.parameters, c.tokens, c.bits, c.damage) for c in cells), strict=True)
    )
    log_n, log_d = np.log(n), np.log(d)

    def predicted(p: Numbers, log_n: Numbers, log_d: Numbers, bits: Numbers) -> Numbers:
        return p[0] + p[1] * (log_d - centre[1]) - p[2] * (log_n - centre[0]) - p[3] * bits  # type: ignore[no-any-return]

    centre = float(log_n.mean()), float(log_d.mean())

    def constants(p: Numbers) -> dict[str, float]:
        return {
            "scale": math.exp(p[0] - p[1] * centre[1] + p[2] * centre[0]),
            "tokens": float(p[1]),
            "parameters": float(p[2]),
            "gamma": 1 / float(p[3]),
        }

    return _fitted(predicted, [[0.0, 0.5, 0.3, 1.0]], (log_n, log_d, bits), np.log(damage), constants, resamples)


def _enough(cells: Sequence[Any], axes: Sequence[str]) -> None:
    values = {axis: sorted({v for c in cells if (v := getattr(c, axis)) is not None}) for axis in axes}
    few = [axis for axis in axes if len(values[axis]) < _LEAST]
    least = _LEAST + len(axes)
    if few or len(cells) < least:
        there = "; ".join(f"{axis}: {', '.join(f'{v:g}' for v in values[axis]) or 'none'}" for axis in axes)
        lacking = ", ".join(f"{_LEAST - len(values[axis])} more of {axis}" for axis in few) or "more runs"
        raise LawError(
            f"{len(cells)} runs found, with {there}; a fit needs at least {_LEAST} values of each and {least} runs. "
            f"Missing: {lacking}. Train them: halfstep sweep --resume with more values of --grid"
        )


def _fitted(
    predicted: Callable[..., Numbers],
    starts: Sequence[Sequence[float]],
    inputs: tuple[Numbers, ...],
    target: Numbers,
    constants: Callable[[Numbers], dict[str, float]],
    resamples: int,
) -> Fitted:
    def solved(picks: NDArray[np.int64], starts: Sequence[Sequence[float]]) -> Numbers:
        taken, wanted = [values[picks] for values in inputs], target[picks]
        tries = [least_squares(lambda p: predicted(p, *taken) - wanted, np.array(start)) for start in starts]
        return min(tries, key=lambda p: float(np.square(predicted(p, *taken) - wanted).sum()))

    count = len(target)
    best = solved(np.arange(count), starts)
    generator = np.random.default_rng(0)
    drawn = [constants(solved(generator.integers(0, count, count), [best.tolist()])) for _ in range(resamples)]
    found = constants(best)
    quantiles = {name: np.quantile([c[name] for c in drawn], [0.025, 0.975]) for name in (found if drawn else ())}
    ends = {name: (float(low), float(high)) for name, (low, high) in quantiles.items()}
    rest = predicted(best, *inputs) - target
    r2 = 1 - float(np.square(rest).sum() / np.square(target - target.mean()).sum())
    return Fitted(found, ends, r2, count, float(np.sqrt(np.square(rest).mean())))


def least_squares(residuals: Callable[[Numbers], Numbers], start: Numbers, steps: int = 300) -> Numbers:
    """Where the sum of squared residuals is lowest, from `start` downhill: Levenberg and Marquardt's method.

    Source: Marquardt 1963, An algorithm for least-squares estimation of nonlinear parameters.
    """
    p, damping = start.astype(np.float64), 1e-3
    rest = residuals(p)
    for _ in range(steps):
        width = 1e-6 * np.maximum(1.0, np.abs(p))
        jacobian = np.stack([(residuals(p + w * e) - rest) / w for w, e in zip(width, np.eye(len(p)), strict=True)], 1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ rest
        moved = p - np.linalg.lstsq(normal + damping * np.diag(np.diag(normal) + 1e-12), slope, rcond=None)[0]
        with np.errstate(all="ignore"):
            tried = residuals(moved)
            better = float(np.square(rest).sum() - np.square(tried).sum())
        if better > 0:  # False for NaN
            small = better < 1e-14 * float(np.square(rest).sum())
            p, rest, damping = moved, tried, damping / 5
            if small:
                break
        elif damping > 1e12:
            break
        else:
            damping *= 4
    return p
