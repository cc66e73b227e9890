"""Functions whose operands are rounded: one derivative, and that of the whole batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import RecipeError


_REMEDY = (
    "keep these layers unrounded by module_filter or by a rule of the recipe, or take a recipe without rules, such as "
    "bf16-mixed"
)


class Once(torch.autograd.Function):
    """Forward mode is refused, and so is `vmap`: a scale of the whole batch, or of each sample, would be a guess."""

    @staticmethod
    def tangent(*_: Any) -> Any:
        raise RecipeError(
            "a forward-mode derivative (torch.func.jvp, jacfwd, hessian) goes through a product whose operands are "
            f"rounded, and a recipe rounds none in that mode: take reverse mode (grad, vjp), {_REMEDY}"
        )

    @staticmethod
    def vmap(*_: Any) -> Any:
        _refuse_batched("torch.func.vmap (jacrev and gradients of each sample use it)")


def _refuse_batched(how: str) -> None:
    raise RecipeError(
        f"{how} goes over a product whose operands are rounded; its scales could be the batch's or each sample's own: "
        f"loop over the samples, {_REMEDY}"
    )


def once(form: Callable[..., Any], grad: Tensor | None, *inputs: Any) -> Any:
    """form(grad, *inputs), gradients of a rounded product, whose own derivative is an error if it is taken.

    Some of the tensors among the inputs must depend on whatever the gradients do.

    Raises:
        RecipeError: the gradient is a batch of gradients (`is_grads_batched`), which no memory holds.
    """
    if torch.compiler.is_compiling():  # a traced graph refuses second derivatives itself
        return form(grad, *inputs)
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and grad is not None and not torch._C._has_storage(grad):
        _refuse_batched("torch.autograd.grad with is_grads_batched=True (and functional.jacobian with vectorize=True)")
    if not torch.is_grad_enabled() and not transformed:  # no derivative of it is taken
        return form(grad, *inputs)
    return _Gradients.apply(form, grad, *inputs)  # type: ignore[no-untyped-call]


class _Gradients(Once):
    @staticmethod
    def forward(form: Callable[..., Any], *inputs: Any) -> Any:
        return form(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RecipeError(
            "a second derivative (a gradient penalty, a Hessian) goes through a product whose operands are rounded, "
            f"and it has none: {_REMEDY}"
        )
