"""How autograd Functions are called, Functions with a first derivative alone, and inputs that several layers share.

`run` calls a Function with separate `forward` and `setup_context` at the speed of one whose forward takes ctx. `Once`
is the base of Functions that round operands: first derivatives only, no forward mode, no vmap. `LastInput` lets layers
that read one input (attention's q, k and v; an MLP's gate and up) round or cast it, and save it for backward, once.
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
    """`function.apply(*inputs)`, faster: outside of `torch.func` transforms and torch.compile, by a Function whose
    forward takes ctx, because torch binds the arguments of a Function with `setup_context` by signature at each call.

    A Function whose forward also returns the tensors that its backward needs (the only way in a graph) may define
    `keep(ctx, inputs, output)`, the part of `setup_context` that saves them, and `outputs`, how many outputs its
    callers get. `tangent(ctx, *tangents)` is a Function's `jvp`, under another name since torch.compile traces no
    Function with a `jvp`. Without it, forward mode raises.
    """
    if torch.compiler.is_compiling():
        return function.apply(*inputs)  # type: ignore[no-untyped-call]
    transformed = torch._C._are_functorch_transforms_active()
    return (_with_tangent(function) if transformed else _direct(function)).apply(*inputs)


def apart(y: Tensor) -> Tensor:
    """A copy of y while torch 2.11 traces, else y.

    If an autograd Function's forward ends in an op that may return its input (an in-place op, `.to()` of the same
    dtype), torch 2.11's tracer silently gives zero gradients.
    """
    return y.clone() if _LOSES and not has_memory(y, or_fake=True) else y


def is_derived() -> bool:
    """Whether, in a backward pass, its results may be differentiated again (create_graph or a torch.func transform)."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off on x's device. It does nothing if autocast is off already: entering costs as
    much as calling a Function."""
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


class SavesNothing(torch.autograd.Function):
    """A base of Functions whose forward saves nothing for backward."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Once(torch.autograd.Function):
    """A base of Functions that refuse forward mode and vmap. Under vmap, scales could be the whole batch's or each
    sample's."""

    @staticmethod
    def tangent(*_: Any) -> Any:
        raise RecipeError(
            "a forward-mode derivative (torch.func.jvp, jacfwd, hessian) goes through a matmul whose operands are "
            f"rounded, and a recipe rounds none in that mode: take reverse mode (grad, vjp), {_REMEDY}"
        )

    @staticmethod
    def vmap(*_: Any) -> Any:
        _refuse_batched("torch.func.vmap (jacrev and gradients of each sample use it)")


def _refuse_batched(how: str) -> None:
    raise RecipeError(
        f"{how} goes over a matmul whose operands are rounded; its scales could be the batch's or each sample's own: "
        f"loop over the samples, {_REMEDY}"
    )


def once(form: Callable[..., Any], grad: Tensor | None, *inputs: Any) -> Any:
    """form(grad, *inputs): the gradients of a matmul with rounded operands. Differentiating them again is an error.

    For that error to be reached, tensors among the inputs must depend on all that the gradients depend on.

    Raises:
        RecipeError: grad is a batch of gradients (`is_grads_batched`), a tensor without storage.
    """
    if torch.compiler.is_compiling():  # a traced graph refuses second derivatives itself
        return form(grad, *inputs)
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and grad is not None and not torch._C._has_storage(grad):
        _refuse_batched("torch.autograd.grad with is_grads_batched=True (and functional.jacobian with vectorize=True)")
    if not torch.is_grad_enabled() and not transformed:  # the gradients are not differentiated
        return form(grad, *inputs)
    return _Gradients.apply(form, grad, *inputs)  # type: ignore[no-untyped-call]


class _Gradients(Once, SavesNothing):
    @staticmethod
    def forward(form: Callable[..., Any], *inputs: Any) -> Any:
        return form(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RecipeError(
            "a second derivative (a gradient penalty, a Hessian) goes through a matmul whose operands are rounded, "
            f"and it has none: {_REMEDY}"
        )


# ---- inputs of several layers ----------------------------------------------------------------------------------------


class LastInput:
    """A cache of one entry: the operand that a model's last layer rounded its input to, until that input is freed.

    Only for inputs that a differentiated operation made: one from outside may be written to without a change of its
    version, and a CUDA graph reads it again in each replay. A copy or pickle of it is empty.
    """

    _last: tuple[weakref.ref[Tensor], Any, Any] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return LastInput, ()

    def find(self, x: Tensor, key: Any) -> Any:
        """The entry noted for x with an equal key, in the same version of x and on the same stream; else None."""
        last = self._last
        return last[2] if last is not None and last[0]() is x and last[1] == _place(x, key) else None

    def note(self, x: Tensor, key: Any, made: Any) -> None:
        """Replace the entry by `made`, the operand that x was rounded to."""
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
    """x (float32) cast to autocast's dtype; x itself if autocast would not cast it, or in a traced graph or transform.

    torch casts x, and saves a copy, for each layer that reads it. Here later layers share the first one's copy.
    Their gradients are added in float32, as torch adds them.
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
    """The autograd Function of a cast from float32 whose result exists already."""

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
