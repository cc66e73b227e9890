"""Whether a recipe's products run on tensor cores for their own format here, and why not."""

from __future__ import annotations

from typing import Literal, overload

import torch

from halfstep.kernels import carried, scaled_mm
from halfstep.ops.carriers import operand_dtype
from halfstep.ops.folding import folds
from halfstep.recipe import LinearSpec, Matmul, Recipe, get_recipe


@overload
def is_native_available(recipe: str | Recipe, device: str | torch.device = "cuda") -> bool: ...


@overload
def is_native_available(
    recipe: str | Recipe, device: str | torch.device = "cuda", *, return_reason: Literal[True]
) -> tuple[bool, str]: ...


def is_native_available(
    recipe: str | Recipe, device: str | torch.device = "cuda", *, return_reason: bool = False
) -> bool | tuple[bool, str]:
    """Whether every product of rounded operands in the recipe is formed by a GPU's FP8 or FP4 tensor cores there; else
    those that are not are carried in 16 or 32 bits.

    Products whose sides are not multiples of 16 are always carried (tiles of 1x32 and 1x16: the shared side, of 32;
    tiles of 128: the shared side and a side of squares, of 128, rows, of 4).

    Args:
        return_reason: return (available, reason), the reason empty where it is.

    >>> is_native_available("bf16-mixed", "cpu", return_reason=True)
    (False, 'bf16-mixed rounds no operand')
    """
    recipe, device = get_recipe(recipe), torch.device(device)
    rules = [rule for stage in recipe.by_stage for rule in stage.rules]
    products = {p for r in rules for p in (r.linear.output, r.linear.grad_input, r.linear.grad_weight)}
    rounded = [product for product in products if product.lhs is not None or product.rhs is not None]
    found = [scaled_mm.product_refusal(product.lhs, product.rhs, device) for product in rounded]
    refusals = {why for why in found if why is not None}
    refusals |= {str(product.accumulate) for product in products if product.accumulate is not None}
    reason = "; ".join(sorted(refusals)) if rounded else f"{recipe.name} rounds no operand"
    return (not reason, reason) if return_reason else not reason


def matmuls_text(spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> str:
    """What computes a layer's three matmuls in `dtype` on a device: "native", or the dtypes that emulate them, and why.

    Native ones whose sizes do not fit the tensor cores (`is_native_available`) are emulated too.
    """
    products = (spec.output, spec.grad_input, spec.grad_weight)
    rounded = [product for product in products if product.lhs or product.rhs or product.accumulate]
    why = {_refusal(product, device) for product in rounded}
    if why == {None}:
        return "native"
    dtypes = dict.fromkeys(
        str(gemm_dtype(product, dtype, device)).removeprefix("torch.")
        for product in rounded
        if _refusal(product, device) is not None
    )
    native = "native and " if None in why else ""
    return f"{native}emulated in {' and '.join(dtypes)} ({'; '.join(sorted(filter(None, why)))})"


def _refusal(product: Matmul, device: torch.device) -> str | None:
    """Why tensor cores there do not compute a product; None where they do."""
    if product.accumulate is not None:
        return str(product.accumulate)
    return scaled_mm.product_refusal(product.lhs, product.rhs, device)


def gemm_dtype(product: Matmul, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the GEMM that emulates a product whose result comes in `dtype`: int8 of integers, whose sums are
    exact; float32 where an operand does not fit `dtype` exactly, or the device has no matrix units for that."""
    if product.accumulate is not None:
        return torch.float32
    found = {operand_dtype(quantizer, dtype, device) for quantizer in (product.lhs, product.rhs)}
    if found == {torch.int8}:
        return torch.int8
    if folds(product):  # integers of one side, whose scales the other one takes in
        found.discard(torch.int8)
    return dtype if found == {dtype} and not carried.supports(dtype, device) else torch.float32
