"""`Matmul`, `LinearSpec` and `AttentionSpec`: how a recipe rounds the operands of matmuls, and their multipliers."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from halfstep.errors import RecipeError
from halfstep.quant import ROW, TENSOR, Accumulator, Hadamard, Quantizer
from halfstep.quant.hadamard import RANDOM
from halfstep.recipe.projection import LARGEST


_STEEPEST = 8
_SIZES = ("rows", "shared", "columns")


@dataclass(frozen=True)
class Multiplier:
    """A factor constant * rows^a * shared^b * columns^c for a matmul (rows, shared) x (shared, columns).

    It multiplies the result before its one rounding, so that a factor of unit scaling costs no pass over memory and no
    second rounding. For a layer with fan-in m, fan-out n and b rows, the matmuls are (b, m) (m, n) forward, (b, n) (n,
    m) for the gradient of the input, and (n, b) (b, m) for that of the weight; for the bias, that of the weight with
    one column.

    Raises:
        RecipeError: a power or constant that is not finite, or a constant that is not positive.

    >>> Multiplier(shared=-0.5).of(512, 256, 1024)
    0.0625
    """

    rows: float = 0.0
    shared: float = 0.0
    columns: float = 0.0
    constant: float = 1.0

    def __post_init__(self) -> None:
        powers = all(abs(power) <= _STEEPEST for power in (self.rows, self.shared, self.columns))
        if not powers or not 0 < self.constant <= LARGEST:
            raise RecipeError(
                f"{self!r}: found a power or a constant that multiplies nothing sensibly; expected finite powers of "
                "rows, shared and columns, and a positive, finite constant"
            )

    def of(self, rows: float, shared: float, columns: float) -> float:
        """The factor for a matmul of these sizes. A size of 0 counts as 1, since there is nothing to scale."""
        number = self.constant
        for size, power in ((rows, self.rows), (shared, self.shared), (columns, self.columns)):
            if power:
                number = number * (size if size > 0 else 1) ** power
        return number

    def __str__(self) -> str:
        powers = [f"{name}^{power:g}" for name in _SIZES if (power := getattr(self, name))]
        return " ".join([f"{self.constant:g}"] * (self.constant != 1.0 or not powers) + powers)


OPERANDS = ("input", "weight", "grad_output")
"""The three tensors that a linear layer's matmuls take, each in two of them."""


@dataclass(frozen=True)
class Matmul:
    """One of the three matmuls of a linear layer. An operand of None is not rounded; sums are float32 by default.

    Raises:
        RecipeError: an operand whose scaling is not linear; a Hadamard transform with operands that are not both
            rounded, or whose scaling has a state.
    """

    lhs: Quantizer | None = None
    rhs: Quantizer | None = None
    accumulate: Accumulator | None = None
    multiplier: Multiplier | None = None
    """A factor of the result before it is rounded; None is 1."""
    hadamard: Hadamard | None = None
    """A Hadamard transform that rotates both operands, in blocks along their shared dimension, before they are rounded;
    None: no rotation."""

    def __post_init__(self) -> None:
        for quantizer in (self.lhs, self.rhs):
            scales = quantizer and quantizer.scales
            if quantizer is not None and scales and not scales.rule.linear:
                raise RecipeError(
                    f"an operand of a matmul in {quantizer.format.name} ({scales}): a matmul takes codes times a "
                    f"scale, but {scales.rule.name} is for stored tensors (moments, masters). Take current, rceil or "
                    "absmax"
                )
            if self.hadamard is not None and (quantizer is None or quantizer.stateful):
                found = quantizer.stateful.name if quantizer and quantizer.stateful else "no rounding"
                raise RecipeError(
                    f"hadamard = {self.hadamard} beside an operand with {found}: it rotates both operands of a matmul "
                    "that rounds both, and a scaling's state would belong to the unrotated tensor. Round both with a "
                    "scaling without a state (current, two_level, floor ...), or leave hadamard out"
                )

    @cached_property
    def draws(self) -> bool:
        """Whether it draws noise for stochastic rounding, or random signs."""
        return _drawn((self.lhs, self.rhs), [self])

    @cached_property
    def folds(self) -> bool:
        """Whether rhs has scales that vary along the shared dimension and are multiplied into lhs before rounding it
        (`sides.folded`). Not possible if lhs's scaling has a state or the operands are rotated."""
        lhs, rhs = self.lhs, self.rhs
        if lhs is None or lhs.stateful or rhs is None or rhs.scales is None or self.hadamard is not None:
            return False
        return rhs.steps is not None and rhs.scales.tile == ROW.transposed


def _drawn(operands: Iterable[Quantizer | None], products: Iterable[Matmul]) -> bool:
    """Whether an operand is rounded stochastically, or a matmul rotated by signs that each call draws."""
    noisy = any(quantizer is not None and quantizer.rounding == "stochastic" for quantizer in operands)
    return noisy or any(product.hadamard is not None and product.hadamard.seed == RANDOM for product in products)


@dataclass(frozen=True)
class LinearSpec:
    """The three matmuls of a linear layer y = x w^T, and how their six operands are rounded."""

    output: Matmul = Matmul()
    """x (rows, in) times w^T (in, out)"""
    grad_input: Matmul = Matmul()
    """dy (rows, out) times w (out, in)"""
    grad_weight: Matmul = Matmul()
    """dy^T (out, rows) times x (rows, in)"""

    def __post_init__(self) -> None:
        for name, (first, second) in self._uses().items():
            stateful = [q for q in (first, second) if q is not None and q.stateful]
            if len(set(stateful)) > 1:
                raise RecipeError(f"{name} follows two stateful scalings; give both of its matmuls the same one")
        self._check_estimators()
        operands = [quantizer for uses in self._uses().values() for quantizer in uses if quantizer is not None]
        for quantizer in {id(quantizer): quantizer for quantizer in operands}.values():  # equal ones have own caches
            forms = (quantizer, quantizer.down, quantizer.plain, quantizer.down.plain, quantizer.plain.down)
            for known in (*forms, *[form.inner for form in forms if form.inner is not None]):
                _ = known.down.down, known.plain, known.steps  # a traced graph cannot take a cached property's lock
                _ = known.inner, known.down.plain, known.plain.down.down, known.factors, known.down.factors
                _ = known.container, known.down.container, known.stateful, known.down.stateful
                _ = known.by_rows, known.down.by_rows, known.plain.by_rows, known.plain.down.by_rows
        _ = self.rerounded, self.estimates, self.draws, self.rounds, self.rotates, self.accumulates, self.multiplies
        _ = self.rounds_input_alike, self.output.folds, self.grad_input.folds, self.grad_weight.folds

    def _check_estimators(self) -> None:
        """Raise for an estimator of an operand other than the forward's weight, or of a rotated weight."""
        own = None if self.output.rhs is None else self.output.rhs.estimator
        for name, uses in self._uses().items():
            found = next((q.estimator for q in uses if q is not None and q.estimator is not None), None)
            if found is not None and (name != "weight" or own is None):
                raise RecipeError(
                    f"an {found} for {name if name != 'weight' else 'the weight of the backward matmul alone'}: "
                    "expected one for the weight of the forward matmul (output.rhs), whose gradient is multiplied by "
                    "the derivative. The gradients of inputs pass straight through"
                )
        if own is not None and self.output.hadamard is not None:
            raise RecipeError(
                f"an {own} for a weight that {self.output.hadamard} rotates first: "
                "its derivative would be that of the rotated weight. Leave one of them out"
            )

    @cached_property
    def known(self) -> dict[Any, Any]:
        """A cache of decisions by layer sizes and device; copies and pickles of the spec do not have it."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "known"}

    @cached_property
    def estimates(self) -> bool:
        """Whether the gradient of the weight is multiplied by an estimator's derivative."""
        return self.output.rhs is not None and self.output.rhs.estimator is not None

    @cached_property
    def states(self) -> dict[str, Quantizer]:
        """The quantizers of operands whose scales depend on earlier steps, by tensor."""
        found = {name: [q for q in uses if q is not None and q.stateful] for name, uses in self._uses().items()}
        return {name: quantizers[0] for name, quantizers in found.items() if quantizers}

    @cached_property
    def quantizers(self) -> tuple[Quantizer, ...]:
        """The quantizers of all rounded operands, each once."""
        return tuple(dict.fromkeys(q for uses in self._uses().values() for q in uses if q is not None))

    @cached_property
    def rerounded(self) -> frozenset[str]:
        """The tensors (`input`, `weight`, `grad_output`) that are rounded again for the second of their two matmuls,
        since that rounds them otherwise, or either matmul rotates them."""
        products = {
            "input": (self.output, self.grad_weight),
            "weight": (self.output, self.grad_input),
            "grad_output": (self.grad_input, self.grad_weight),
        }
        return frozenset(
            name
            for name, (first, second) in self._uses().items()
            if any(product.hadamard for product in products[name]) or (second.down if second else None) != first
        )

    @cached_property
    def input_codes(self) -> Quantizer | None:
        """The quantizer of the input, if the input can be saved for backward as codes: both of its matmuls round it
        alike, to 8 bits with one scale a tensor. Else None."""
        quantizer = self.output.lhs
        if quantizer is None or quantizer.scales is None or "input" in self.rerounded:
            return None
        format, rule = quantizer.format, quantizer.scales.rule
        whole = (
            quantizer.stateful is not None
            or rule.factor(torch.ones((), dtype=torch.float32, device="cpu"), format) is not None
        )
        fits = quantizer.scales.tile == TENSOR and quantizer.outliers is None and format.bits == 8 and format.has_nan
        fits = fits and quantizer.clamp is None
        return quantizer if whole and fits else None

    @cached_property
    def draws(self) -> bool:
        """Whether any matmul draws noise or signs."""
        return any(product.draws for product in (self.output, self.grad_input, self.grad_weight))

    @cached_property
    def rounds_weight_once(self) -> bool:
        """Whether the forward matmul rounds the weight, and every call rounds it alike, without noise or signs that
        each call draws."""
        return self.output.rhs is not None and not _drawn(
            (self.output.rhs, self.grad_input.rhs), (self.output, self.grad_input)
        )

    @cached_property
    def rounds_input_alike(self) -> bool:
        """Whether all layers with this spec round an input to the same values: without noise, signs or states of their
        own."""
        quantizer = self.output.lhs
        drawn = _drawn((quantizer, self.grad_weight.rhs), (self.output, self.grad_weight))
        return quantizer is not None and not quantizer.stateful and not drawn

    @cached_property
    def rounds(self) -> bool:
        """Whether any operand or accumulation is rounded."""
        return len(self.quantizers) > 0 or self.accumulates

    @cached_property
    def rotates(self) -> bool:
        """Whether any matmul has a Hadamard transform."""
        return any(product.hadamard for product in (self.output, self.grad_input, self.grad_weight))

    @cached_property
    def accumulates(self) -> bool:
        """Whether any matmul has an accumulator other than float32."""
        return any(product.accumulate for product in (self.output, self.grad_input, self.grad_weight))

    @cached_property
    def multiplies(self) -> bool:
        """Whether any matmul has a multiplier."""
        return any(product.multiplier for product in (self.output, self.grad_input, self.grad_weight))

    def times(self, multipliers: "LinearSpec") -> "LinearSpec":
        """This spec with the multipliers of the other one.

        Raises:
            RecipeError: both have multipliers.
        """
        if not multipliers.multiplies:
            return self
        if self.multiplies:
            raise RecipeError(
                f"two sets of multipliers for the same matmuls: {linear_text(self)}; and {linear_text(multipliers)}. "
                "Expected one: leave them out of the recipe's rule, or out of the layer"
            )
        products = {
            field.name: replace(getattr(self, field.name), multiplier=getattr(multipliers, field.name).multiplier)
            for field in fields(self)
        }
        return LinearSpec(**products)

    def _uses(self) -> dict[str, tuple[Quantizer | None, Quantizer | None]]:
        return {
            "input": (self.output.lhs, self.grad_weight.rhs),
            "weight": (self.output.rhs, self.grad_input.rhs),
            "grad_output": (self.grad_input.lhs, self.grad_weight.lhs),
        }


def linear_spec(
    input: Quantizer | None = None,
    weight: Quantizer | None = None,
    grad_output: Quantizer | None = None,
    accumulate: Accumulator | None = None,
) -> LinearSpec:
    """A spec in which each tensor is rounded alike in both of its matmuls, and all three accumulate alike."""
    products = (input, weight), (grad_output, weight), (grad_output, input)
    return LinearSpec(*[Matmul(lhs, rhs, accumulate) for lhs, rhs in products])


@dataclass(frozen=True)
class AttentionSpec:
    """The two matmuls of attention, softmax(q k^T / sqrt(d)) v, each as a linear layer with its backward matmuls.

    Raises:
        RecipeError: a scaling with a state, tiles of several rows, estimators, or clamps with compensation: stacks of
            matrices do not support them.
    """

    scores: LinearSpec = LinearSpec()
    """q k^T: q is the input, k the weight."""
    mix: LinearSpec = LinearSpec()
    """softmax(...) v: the attention weights are the input, v^T the weight."""

    def __post_init__(self) -> None:
        for quantizer in (*self.scores.quantizers, *self.mix.quantizers):
            if quantizer.estimator is not None or (quantizer.clamp is not None and quantizer.clamp.compensation):
                raise RecipeError(
                    f"attention with {quantizer.format.name} ({quantizer.estimator or quantizer.clamp}): its operands "
                    "are not weights, and its batched matmuls do not support a clamp's sparse remainder. Leave the "
                    "estimator out, and give a clamp compensation = false"
                )
            if quantizer.stateful or (quantizer.scales is not None and quantizer.scales.tile.rows > 1):
                raise RecipeError(
                    f"attention with {quantizer.format.name} ({quantizer.scales}): its matmuls "
                    "take scalings without a state (current, rceil, floor ...) and one scale a tensor, row or block"
                )

    @property
    def draws(self) -> bool:
        """Whether any matmul draws noise or signs."""
        return self.scores.draws or self.mix.draws

    @property
    def rounds(self) -> bool:
        """Whether any operand or accumulation is rounded."""
        return self.scores.rounds or self.mix.rounds

    @property
    def multiplies(self) -> bool:
        """Whether any matmul has a multiplier."""
        return self.scores.multiplies or self.mix.multiplies

    def times(self, multipliers: "AttentionSpec") -> "AttentionSpec":
        """This spec with the multipliers of the other one, as `LinearSpec.times`."""
        return AttentionSpec(self.scores.times(multipliers.scores), self.mix.times(multipliers.mix))


def linear_text(spec: LinearSpec) -> str:
    """The three matmuls in one line, for `Recipe.describe`."""
    return ", ".join(matmul_texts(spec))


def matmul_texts(spec: LinearSpec) -> tuple[str, ...]:
    """The name of each of the three matmuls and how its operands are rounded, in words."""

    def side(quantizer: Quantizer | None) -> str:
        if quantizer is None:
            return "-"
        rounding = quantizer.rounding if quantizer.scales and quantizer.rounding != "nearest_even" else None
        said = (quantizer.scales, rounding, quantizer.clamp, quantizer.estimator)
        words = ", ".join(str(part) for part in said if part is not None)
        return quantizer.format.name + (f" ({words})" if words else "")

    def sums(product: Matmul) -> str:
        times = f" times {product.multiplier}" if product.multiplier else ""
        rotated = f" ({product.hadamard})" if product.hadamard else ""
        return (f" ({product.accumulate})" if product.accumulate else "") + rotated + times

    products = {"output": spec.output, "grad_input": spec.grad_input, "grad_weight": spec.grad_weight}
    return tuple(f"{name} {side(p.lhs)} x {side(p.rhs)}{sums(p)}" for name, p in products.items())
