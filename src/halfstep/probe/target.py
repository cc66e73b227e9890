"""What running a model in a format means: the recipe that does it, and those to try when it is not safe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfstep import formats
from halfstep.bits.limits import Limits, limits_of
from halfstep.errors import FormatError
from halfstep.formats import Format
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import DTYPES, LossScale, Recipe, Rule, get_recipe, linear_spec
from halfstep.recipe.high_precision import KEEP


_STORED = {
    "fp16": ("fp16-master", ("fp16-mixed", "bf16-master")),
    "bf16": ("bf16-master", ("bf16-mixed", "fp32")),
    "fp32": ("fp32", ()),
}


@dataclass(frozen=True)
class Target:
    """A format, the recipe that puts a model into it, and other recipes, the most alike first."""

    limits: Limits
    recipe: Recipe
    others: tuple[Recipe, ...]
    stored: bool
    """Whether whole tensors are stored in it; otherwise the operands of layers' products are rounded to it."""

    @property
    def format(self) -> Format:
        """The format."""
        return self.limits.format


def target(to: object, loss_scale: float | None = None) -> Target:
    """The target of a format's name, a `Format` or a `torch.dtype`.

    fp16 and bf16 mean all of the model: weights, activations and gradients, as `model.to(dtype)` has them, trained with
    the loss scale of fp16-master (fp16) or none. Any other format means the operands of all layers' products, heads
    and routers apart, rounded to it without a scale, the rest in float32.

    Args:
        loss_scale: a constant one, in the place of the recipe's.

    Raises:
        FormatError: unknown format, a block format, or one without negative values.
    """
    format = formats.get(to)
    if not format.signed:
        raise FormatError(f"{format.name} has no negative values; probe one that can hold activations, such as e4m3fn")
    stored = format.name in DTYPES
    if stored:
        name, others = _STORED[format.name]
        recipes = [get_recipe(name), *map(get_recipe, others)]
    else:
        plain, scaled = Quantizer(format), Quantizer(format, scales=Scales(TENSOR, get_scaling("current")))
        recipes = [_rounding(f"{format.name}-unscaled", plain), _rounding(f"{format.name}-current", scaled)]
        recipes += [get_recipe("bf16-mixed")]
    if loss_scale is not None:
        recipes[0] = replace(recipes[0], loss_scale=LossScale(init=loss_scale, dynamic=False))
    return Target(limits_of(format, stored), recipes[0], tuple(recipes[1:]), stored)


def _rounding(name: str, quantizer: Quantizer) -> Recipe:
    scaled = "one scale a tensor, from its own amax" if quantizer.scales else "no scale"
    rules = (*KEEP, Rule("*", linear_spec(input=quantizer, weight=quantizer, grad_output=quantizer)))
    return Recipe(
        name,
        summary=f"Operands of products in {quantizer.format.name}, {scaled}; the rest in fp32.",
        source="halfstep probe",
        rules=rules,
    )
