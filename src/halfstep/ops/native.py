"""Whether a recipe's products run on hardware units of their own format here, and why not."""

from __future__ import annotations

from typing import Literal, overload

import torch

from halfstep.kernels import scaled_mm
from halfstep.recipe import Recipe, get_recipe


@overload
def is_native_available(recipe: str | Recipe, device: str | torch.device = "cuda") -> bool: ...


@overload
def is_native_available(
    recipe: str | Recipe, device: str | torch.device = "cuda", *, return_reason: Literal[True]
) -> tuple[bool, str]: ...


def is_native_available(
    recipe: str | Recipe, device: str | torch.device = "cuda", *, return_reason: bool = False
) -> bool | tuple[bool, str]:
    """Whether every rounded operand of the recipe is multiplied by FP8 units there; else products are carried.

    Products whose sides are not multiples of 16 are always carried.

    Args:
        return_reason: return (available, reason), the reason empty where it is.

    >>> is_native_available("bf16-mixed", "cpu", return_reason=True)
    (False, 'bf16-mixed rounds no operand')
    """
    recipe, device = get_recipe(recipe), torch.device(device)
    rules = [rule for stage in recipe.by_stage for rule in stage.rules]
    quantizers = {quantizer for rule in rules for quantizer in rule.linear.quantizers}
    refusals = {why for quantizer in quantizers if (why := scaled_mm.refusal(quantizer, device)) is not None}
    products = [p for r in rules for p in (r.linear.output, r.linear.grad_input, r.linear.grad_weight)]
    refusals |= {str(product.accumulate) for product in products if product.accumulate is not None}
    reason = "; ".join(sorted(refusals)) if quantizers else f"{recipe.name} rounds no operand"
    return (not reason, reason) if return_reason else not reason
