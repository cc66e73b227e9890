"""The cases of docs/fp4.md: recipes of few bits, and the same with one part removed or changed.

A case derives its recipe from the named one when called, so that changes of a named recipe apply to its cases.
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
    """A recipe to train, and the case that it is compared with besides fp32."""

    name: str
    make: Callable[[], Recipe]
    base: str | None = None
    """The case of which this one removes or changes a part."""
    constant: bool = False
    """Whether the learning rate is constant after the warm-up."""
    rate: float = 1.0
    """The factor of the learning rate."""

    @property
    def baseline(self) -> str:
        """The name of the fp32 case with the same learning rate schedule."""
        return CONSTANT if self.constant else "fp32"


CONSTANT = "fp32 constant lr"


def changed(recipe: Recipe, **parts: Any) -> Recipe:
    """The recipe with these fields replaced.

    Raises:
        ValueError: they have these values already, so that nothing would be compared.
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
"""By matmul: the tensors that it multiplies."""


def of_operands(
    recipe: Recipe,
    change: Callable[[Quantizer], Quantizer],
    tensors: Collection[str] = ("input", "weight", "grad_output"),
) -> Recipe:
    """The recipe with the quantizer changed of every operand that is rounded and made of one of those tensors."""

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
    """A recipe that rounds all six operands of every layer to one block format, to nearest, and nothing else."""
    quantizer = get_quantizer(format, **how)
    return Recipe(
        f"{format}-plain",
        summary=f"Inputs, weights and gradients in {format}, rounded to nearest; output heads in bf16.",
        source="a control of docs/fp4.md",
        compute="bf16",
        rules=(*KEEP, Rule("*", linear_spec(input=quantizer, weight=quantizer, grad_output=quantizer))),
    )


def named(name: str) -> Case:
    """The case of a recipe as it is."""
    return Case(name, partial(get_recipe, name))


def without(base: str, part: str, change: Callable[[Recipe], Recipe]) -> Case:
    """The case of a recipe with a part removed or changed."""
    return Case(f"{base} {part}", lambda: change(get_recipe(base)), base)


def at_rate(name: str, rate: float) -> Case:
    """The case of a recipe at another learning rate, which shows whether a difference to fp32 is due to the learning
    rate."""
    return Case(f"{name} lr x {rate:g}", partial(get_recipe, name), name, rate=rate)


# ---- Wang et al. ----------------------------------------------------------------------------------------------------


def no_estimator(recipe: Recipe) -> Recipe:
    """The recipe without estimators: the derivative of rounding is taken as 1."""
    return of_operands(recipe, lambda operand: replace(operand, estimator=None))


def no_clamp(recipe: Recipe) -> Recipe:
    """The recipe without clamps: outliers are rounded like other values."""
    return of_operands(recipe, lambda operand: replace(operand, clamp=None))


def no_compensation(recipe: Recipe) -> Recipe:
    """The recipe with clamps but without compensation: what exceeds the clamp is lost."""

    def change(operand: Quantizer) -> Quantizer:
        return replace(operand, clamp=operand.clamp and replace(operand.clamp, compensation=False))

    return of_operands(recipe, change)


def direct(recipe: Recipe) -> Recipe:
    """The recipe without estimators and clamps."""
    return no_clamp(no_estimator(recipe))


def steepness(k: float) -> Callable[[Recipe], Recipe]:
    """A change of recipes: the estimators' k."""

    def change(operand: Quantizer) -> Quantizer:
        return replace(operand, estimator=operand.estimator and replace(operand.estimator, k=k))

    return lambda recipe: of_operands(recipe, change)


def one_scale(*tensors: str) -> Callable[[Recipe], Recipe]:
    """A change of recipes: one scale per tensor for those of `tensors` that are in FP4."""

    def change(operand: Quantizer) -> Quantizer:
        if operand.scales is None or operand.format.bits != 4:
            return operand
        return replace(operand, scales=replace(operand.scales, tile=TENSOR))

    return lambda recipe: of_operands(recipe, change, tensors)


def direct_but(tensor: str) -> Callable[[Recipe], Recipe]:
    """A change of recipes: `direct`, with one tensor in E4M3 instead of FP4."""

    def change(operand: Quantizer) -> Quantizer:
        return replace(operand, format=formats.get("e4m3fn"))

    return lambda recipe: of_operands(direct(recipe), change, (tensor,))


def float32_states(recipe: Recipe) -> Recipe:
    """The recipe with weights, gradients and moments as in fp32: few bits only in matmuls."""
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
    """The recipe without Hadamard rotations."""

    def spec(linear: LinearSpec) -> LinearSpec:
        return LinearSpec(**{name: replace(getattr(linear, name), hadamard=None) for name in TENSORS})

    return changed(recipe, rules=tuple(replace(rule, linear=spec(rule.linear)) for rule in recipe.rules))


def to_nearest(recipe: Recipe) -> Recipe:
    """The recipe with round to nearest even instead of stochastic rounding."""
    return of_operands(recipe, lambda operand: replace(operand, rounding="nearest_even"))


def no_squares(recipe: Recipe) -> Recipe:
    """The recipe with tiles of 1 x n where it has n x n, so that a weight is quantized again for the backward pass."""

    def change(operand: Quantizer) -> Quantizer:
        scales = operand.scales
        if scales is None or scales.tile.rows <= 1:
            return operand
        return replace(operand, scales=replace(scales, tile=block(scales.tile.columns)))

    return of_operands(recipe, change)


def no_kept_blocks(recipe: Recipe) -> Recipe:
    """The recipe with every block of the model in few bits: only the output head stays in high precision."""
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
    """The case of fp4-zhou for that percentage of the run, and bf16-mixed for the rest."""
    words = " constant lr" if constant else ""
    recipe = partial(get_recipe, f"fp4-zhou until {share}%, then bf16-mixed")
    return Case(f"fp4-zhou until {share}%{words}", recipe, f"fp4-zhou{words}", constant)


SWITCHES = (50, 80, 90)
"""When the run switches to bf16-mixed, in percent of its steps."""
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
