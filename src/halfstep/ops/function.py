"""Autograd functions in torch's two parts, `forward` and `setup_context`, called at the price of those in one.

And functions whose operands are rounded: one derivative, and that of the whole batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ModelError, RecipeError
from halfstep.quant.tracing import has_memory


_NOTHING = nullcontext()
_LOSES = torch.__version__.startswith("2.11.")


def run(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply`. Where no transform of `torch.func` is at work, by a function whose forward keeps what its
    backward takes: torch binds the arguments of the other kind by their signature, at each call.

    A function whose forward also gives back what its backward takes, since a graph knows no other way, may have a
    `keep(ctx, inputs, output)`, the part of `setup_context` that saves it, and say how many `outputs` its callers take.
    A function's `tangent(ctx, *tangents)` is its `jvp`, by another name since torch.compile traces no function that has
    one. Functions with neither say so to forward mode.
    """
    if torch.compiler.is_compiling():
        return function.apply(*inputs)  # type: ignore[no-untyped-call]
    transformed = torch._C._are_functorch_transforms_active()
    return (_with_tangent(function) if transformed else _direct(function)).apply(*inputs)


def apart(y: Tensor) -> Tensor:
    """What a forward gives back, apart from what it is made of.

    Where torch 2.11 traces a forward whose last step gives a tensor itself again (a change in place, a cast to the
    dtype that it has), it takes no gradient of it: zeros, without a word.
    """
    return y.clone() if _LOSES and not has_memory(y, or_fake=True) else y


def is_derived() -> bool:
    """Within a backward pass: whether the derivative of what it computes may be taken."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Within it autocast is off on x's device: it is entered where it is on, since that takes as long as a function."""
    if torch.compiler.is_compiling():
        return torch.autocast(x.device.type, enabled=False)
    return torch._C._DisableAutocast() if torch.is_autocast_enabled(x.device.type) else _NOTHING


@cache
def _direct(function: Any) -> Any:
    keeps = getattr(function, "keep", None)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function.forward(*inputs)
        if keeps is None:
            function.setup_context(ctx, inputs, output)
            return output
        keeps(ctx, inputs, output)
        return output[: function.outputs]

    members = {"forward": forward, "backward": function.backward, "jvp": getattr(function, "tangent", _refused)}
    wrapped = {name: staticmethod(member) for name, member in members.items()}
    return type(function.__name__, (torch.autograd.Function,), wrapped)


@cache
def _with_tangent(function: Any) -> Any:
    return type(function.__name__, (function,), {"jvp": staticmethod(getattr(function, "tangent", _refused))})


def _refused(*_: Any) -> Any:
    raise ModelError(
        "a forward-mode derivative (torch.func.jvp, jacfwd, hessian) goes through a unit-scaled operation that has "
        "none: take reverse mode (grad, vjp, jacrev), or halfstep.revert the model"
    )


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
