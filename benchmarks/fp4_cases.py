"""What docs/fp4.md compares: recipes of few bits, and the same with one part taken away or changed.

Each case makes its recipe when it is asked for, of the named one, so that a change of that is a change of its cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from halfstep.quant import Quantizer, get_quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, get_recipe, linear_spec
from halfstep.recipe.high_precision import KEEP


@dataclass(frozen=True)
class Case:
    """A recipe to train, and what it is compared with beside fp32."""

    name: str
    make: Callable[[], Recipe]
    base: str | None = None
    """The case of which one part is taken away or changed here."""
    constant: bool = False
    """Whether the learning rate stays where the warm-up ends."""

    @property
    def baseline(self) -> str:
        """The case in fp32 at the same learning rates."""
        return CONSTANT if self.constant else "fp32"


CONSTANT = "fp32 at a constant rate"


def changed(recipe: Recipe, **parts: Any) -> Recipe:
    """The recipe with other parts.

    Raises:
        ValueError: they are what it has already, so that nothing would be compared.
    """
    made = replace(recipe, **parts)
    if made == recipe:
        raise ValueError(f"{recipe.name} has these {', '.join(parts)} already; expected a part to take away or change")
    return made


def of_products(recipe: Recipe, change: Callable[[Matmul], Matmul]) -> Recipe:
    """The recipe with every product of every rule changed."""

    def spec(linear: LinearSpec) -> LinearSpec:
        return LinearSpec(**{field.name: change(getattr(linear, field.name)) for field in fields(LinearSpec)})

    return changed(recipe, rules=tuple(replace(rule, linear=spec(rule.linear)) for rule in recipe.rules))


def of_operands(recipe: Recipe, change: Callable[[Quantizer], Quantizer]) -> Recipe:
    """The recipe with every operand that is rounded changed."""
    return of_products(
        recipe, lambda product: replace(product, lhs=_or_none(change, product.lhs), rhs=_or_none(change, product.rhs))
    )


def _or_none(change: Callable[[Quantizer], Quantizer], quantizer: Quantizer | None) -> Quantizer | None:
    return None if quantizer is None else change(quantizer)


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


CASES = {
    case.name: case
    for case in (
        *map(named, ("fp32", "bf16-mixed", "fp8-current")),
        Case("mxfp4-plain", partial(plain, "mxfp4")),
        Case("nvfp4-plain", partial(plain, "nvfp4")),
        Case(CONSTANT, partial(get_recipe, "fp32"), constant=True),
    )
}
"""In the order of the page."""
