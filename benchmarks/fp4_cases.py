"""What docs/fp4.md compares: recipes of few bits, and the same with one part taken away or changed.

Each case makes its recipe when it is asked for, of the named one, so that a change of that is a change of its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from halfstep import formats
from halfstep.quant import Quantizer, get_quantizer
from halfstep.quant.tile import TENSOR, block
from halfstep.recipe import LinearSpec, Recipe, Rule, get_recipe, linear_spec
from halfstep.recipe.operands import KEEP


@dataclass(frozen=True)
class Case:
    """A recipe to train, and what it is compared with beside fp32."""

    name: str
    make: Callable[[], Recipe]
    base: str | None = None
    """The case of which one part is taken away or changed here."""
    constant: bool = False
    """Whether the learning rate stays where the warm-up ends."""
    rate: float = 1.0
    """What the learning rate is multiplied by."""

    @property
    def baseline(self) -> str:
        """The case in fp32 at the same learning rates."""
        return CONSTANT if self.constant else "fp32"


CONSTANT = "fp32 constant lr"


def changed(recipe: Recipe, **parts: Any) -> Recipe:
    """The recipe with other parts.

    Raises:
        ValueError: they are what it has already, so that nothing would be compared.
    """
    made = replace(recipe, **parts)
    if made == recipe:
        raise ValueError(f"{recipe.name} has these {', '.join(parts)} already; expected a part to take away or change")
    return made


TENSORS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""By product: the tensors that it multiplies."""


def of_operands(
    recipe: Recipe,
    change: Callable[[Quantizer], Quantizer],
    tensors: Collection[str] = ("input", "weight", "grad_output"),
) -> Recipe:
    """The recipe with every operand changed that is rounded and made of one of those tensors."""

    def operand(quantizer: Quantizer | None, tensor: str) -> Quantizer | None:
        return quantizer if quantizer is None or tensor not in tensors else change(quantizer)

    def spec(linear: LinearSpec) -> LinearSpec:
        made = {}
        for name, (lhs, rhs) in TENSORS.items():
            product = getattr(linear, name)
            made[name] = replace(product, lhs=operand(product.lhs, lhs), rhs=operand(product.rhs, rhs))
        return LinearSpec(**made)

    return changed(recipe, rules=tuple(replace(rule, linear=spec(rule.linear)) for rule in recipe.rules))


def plain(format: str, **how: str) -> Recipe:
    """All six operands of every layer in one block format, rounded to nearest, and nothing else done for them."""
    quantizer = get_quantizer(format, **how)
    return Recipe(
        f"{format}-plain",
        summary=f"Inputs, weights and gradients in {format}, rounded to nearest; output heads in bf16.",
        source="a control of docs/fp4.md",
        compute="bf16",
        rules=(*KEEP, Rule("*", linear_spec(input=quantizer, weight=quantizer, grad_output=quantizer))),
    )


def named(name: str) -> Case:
    """A recipe as it is."""
    return Case(name, partial(get_recipe, name))


def without(base: str, part: str, change: Callable[[Recipe], Recipe]) -> Case:
    """A recipe without a part, or with a part changed."""
    return Case(f"{base} {part}", lambda: change(get_recipe(base)), base)


def at_rate(name: str, rate: float) -> Case:
    """A recipe as it is, at another learning rate: whether a difference to fp32 is one of the rate that fits."""
    return Case(f"{name} lr x {rate:g}", partial(get_recipe, name), name, rate=rate)


# ---- Wang et al. ----------------------------------------------------------------------------------------------------


def no_estimator(recipe: Recipe) -> Recipe:
    """Rounding's derivative taken for 1."""
    return of_operands(recipe, lambda operand: replace(operand, estimator=None))


def no_clamp(recipe: Recipe) -> Recipe:
    """Outliers rounded with the rest."""
    return of_operands(recipe, lambda operand: replace(operand, clamp=None))


def no_compensation(recipe: Recipe) -> Recipe:
    """Outliers clamped, and what is beyond lost."""

    def change(operand: Quantizer) -> Quantizer:
        return replace(operand, clamp=operand.clamp and replace(operand.clamp, compensation=False))

    return of_operands(recipe, change)


def direct(recipe: Recipe) -> Recipe:
    """Neither: rounding alone."""
    return no_clamp(no_estimator(recipe))


def steepness(k: float) -> Callable[[Recipe], Recipe]:
    """The estimator's k."""

    def change(operand: Quantizer) -> Quantizer:
        return replace(operand, estimator=operand.estimator and replace(operand.estimator, k=k))

    return lambda recipe: of_operands(recipe, change)


def one_scale(*tensors: str) -> Callable[[Recipe], Recipe]:
    """One scale a tensor, for those of them that are in FP4."""

    def change(operand: Quantizer) -> Quantizer:
        if operand.scales is None or operand.format.bits != 4:
            return operand
        return replace(operand, scales=replace(operand.scales, tile=TENSOR))

    return lambda recipe: of_operands(recipe, change, tensors)


def direct_but(tensor: str) -> Callable[[Recipe], Recipe]:
    """Rounding alone, and one tensor in E4M3 instead of FP4."""

    def change(operand: Quantizer) -> Quantizer:
        return replace(operand, format=formats.get("e4m3fn"))

    return lambda recipe: of_operands(direct(recipe), change, (tensor,))


def float32_states(recipe: Recipe) -> Recipe:
    """The products alone: weights, gradients and moments as fp32 keeps them."""
    return changed(recipe, codes=None, moments="fp32")


WANG = (
    named("fp4-wang"),
    named("fp4-wang-msamp"),
    without("fp4-wang", "direct", direct),
    without("fp4-wang", "direct W8A4", direct_but("weight")),
    without("fp4-wang", "direct W4A8", direct_but("input")),
    without("fp4-wang", "without estimator", no_estimator),
    without("fp4-wang", "without clamp", no_clamp),
    without("fp4-wang", "without compensation", no_compensation),
    without("fp4-wang", "with states in fp32", float32_states),
    without("fp4-wang", "with k = 3", steepness(3.0)),
    without("fp4-wang", "with k = 10", steepness(10.0)),
    without("fp4-wang", "tensor-wise", one_scale("input", "weight")),
    without("fp4-wang", "tensor-wise weights", one_scale("weight")),
    without("fp4-wang", "tensor-wise inputs", one_scale("input")),
)


# ---- NVFP4 ----------------------------------------------------------------------------------------------------------


def no_hadamard(recipe: Recipe) -> Recipe:
    """No operand rotated."""

    def spec(linear: LinearSpec) -> LinearSpec:
        return LinearSpec(**{name: replace(getattr(linear, name), hadamard=None) for name in TENSORS})

    return changed(recipe, rules=tuple(replace(rule, linear=spec(rule.linear)) for rule in recipe.rules))


def to_nearest(recipe: Recipe) -> Recipe:
    """Nothing rounded stochastically."""
    return of_operands(recipe, lambda operand: replace(operand, rounding="nearest_even"))


def no_squares(recipe: Recipe) -> Recipe:
    """Scales of 1 x n elements where the recipe has n x n, so that a weight is rounded anew for the backward pass."""

    def change(operand: Quantizer) -> Quantizer:
        scales = operand.scales
        if scales is None or scales.tile.rows <= 1:
            return operand
        return replace(operand, scales=replace(scales, tile=block(scales.tile.columns)))

    return of_operands(recipe, change)


def no_kept_blocks(recipe: Recipe) -> Recipe:
    """The model's blocks all in few bits: the output head alone is kept."""
    return changed(recipe, rules=tuple(rule for rule in recipe.rules if rule.blocks is None))


NVFP4 = (
    named("nvfp4"),
    without("nvfp4", "without Hadamard", no_hadamard),
    without("nvfp4", "rounded to nearest", to_nearest),
    without("nvfp4", "without square tiles", no_squares),
    without("nvfp4", "without kept blocks", no_kept_blocks),
)


# ---- Zhou et al. ----------------------------------------------------------------------------------------------------


def until(share: int, constant: bool = False) -> Case:
    """Few bits for that share of the run, in percent, and bf16 for the rest."""
    words = " constant lr" if constant else ""
    recipe = partial(get_recipe, f"fp4-zhou until {share}%, then bf16-mixed")
    return Case(f"fp4-zhou until {share}%{words}", recipe, f"fp4-zhou{words}", constant)


SWITCHES = (50, 80, 90)
"""When few bits end, in percent of the run."""
ZHOU = (
    named("fp4-zhou"),
    named("fp4-zhou-dgrad-bf16"),
    *map(until, SWITCHES),
    Case("fp4-zhou constant lr", partial(get_recipe, "fp4-zhou"), constant=True),
    *(until(share, constant=True) for share in SWITCHES),
)

ALL = (
    *map(named, ("fp32", "bf16-mixed", "fp8-current", "mxfp4")),
    Case("nvfp4-plain", partial(plain, "nvfp4")),
    *WANG,
    *NVFP4,
    *ZHOU,
    Case(CONSTANT, partial(get_recipe, "fp32"), constant=True),
    *(at_rate(name, rate) for name in ("fp32", "fp4-wang") for rate in (0.5, 2.0)),
)
CASES = {case.name: case for case in ALL}
"""In the order of the page."""
