"""Autograd functions in two parts, those of rounded operands, and inputs that several layers read.

Functions in torch's two parts, `forward` and `setup_context`, are called at the price of those in one. Those whose
operands are rounded have one derivative, and that of the whole batch. An input that several layers read (attention's q,
k and v; an MLP's gate and up) is rounded or cast, and kept, once.
"""

import weakref
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


# ---- autograd functions ----------------------------------------------------------------------------------------------


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


# ---- functions with one derivative -----------------------------------------------------------------------------------

_REMEDY = (
    "keep these layers unrounded by module_filter or by a rule of the recipe, or take a recipe without rules, such as "
    "bf16-mixed"
)


class Unkept(torch.autograd.Function):
    """Its backward takes nothing of its forward."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


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


class _Gradients(Once, Unkept):
    @staticmethod
    def forward(form: Callable[..., Any], *inputs: Any) -> Any:
        return form(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RecipeError(
            "a second derivative (a gradient penalty, a Hessian) goes through a product whose operands are rounded, "
            f"and it has none: {_REMEDY}"
        )


# ---- inputs of several layers ----------------------------------------------------------------------------------------


class LastInput:
    """What a model's last layer rounded its input to, as long as that tensor lives. A copy begins with nothing.

    It is for inputs that a differentiated operation made. What came from outside may be written to with no version that
    tells of it, and a CUDA graph reads it again.
    """

    _last: tuple[weakref.ref[Tensor], Any, Any] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return LastInput, ()

    def find(self, x: Tensor, key: Any) -> Any:
        """What was noted of x, with its numbers as they are, by a layer with an equal key on this stream; else None."""
        last = self._last
        return last[2] if last is not None and last[0]() is x and last[1] == _place(x, key) else None

    def note(self, x: Tensor, key: Any, made: Any) -> None:
        """Keep what x was rounded to, in the place of the last one."""
        self._last = weakref.ref(x, self._drop), _place(x, key), made

    def _drop(self, gone: weakref.ref[Tensor]) -> None:
        if self._last is not None and self._last[0] is gone:
            self._last = None


def _place(x: Tensor, key: Any) -> tuple[Any, ...]:
    stream = None
    if x.is_cuda and has_memory(x):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index), torch.cuda.is_current_stream_capturing()
    return x._version, key, stream


def cast_once(x: Tensor, last: LastInput) -> Tensor:
    """x, float32, in autocast's dtype; x itself where autocast would leave it, or a graph or a transform is traced.

    torch casts, and keeps, a copy for each layer that reads x. Here the layers after the first share its copy. Their
    gradients are added in float32, as torch adds them.
    """
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.is_leaf or not has_memory(x, or_fake=True):
        return x
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch._C._get_tracing_state() is not None:
        return x
    dtype = torch.get_autocast_dtype(device)
    found = last.find(x, dtype)
    if found is not None:
        return run(_Shared, x, found)  # type: ignore[no-any-return]
    cast = x.to(dtype)
    last.note(x, dtype, cast.detach())
    return cast


class _Shared(torch.autograd.Function):
    """The cast of a float32 tensor, which is there already."""

    @staticmethod
    def forward(x: Tensor, cast: Tensor) -> Tensor:
        return cast.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None

    @staticmethod
    def tangent(ctx: Any, x: Tensor, cast: None) -> Tensor:
        return x.to(ctx.dtype)
