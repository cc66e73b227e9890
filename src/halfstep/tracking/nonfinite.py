"""The gradients of activations in a step; its first non-finite tensor, and that tensor's magnitude."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from halfstep.optim.gradients import put_back


def first_nonfinite(model: nn.Module, loss: Callable[[], Tensor]) -> str | None:
    """The name of the first tensor with an infinity or NaN, in the order in which a step computes them; None if there
    is none.

    The order is: weights, then the inputs and outputs of each module in the order of the forward, then the loss, then
    the gradients in the order of the backward. `loss` runs the forward and returns the loss; it is called once, and the
    parameters' gradients are restored afterwards.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"weight {name}"
    found: list[str] = []

    def look(name: str, tensor: Tensor) -> None:
        if not found and not _finite(tensor):
            found.append(name)

    _step(model, loss, look, lambda: not found)
    return found[0] if found else None


def magnitude(model: nn.Module, loss: Callable[[], Tensor], name: str) -> float | None:
    """The largest magnitude of the tensor named by `first_nonfinite`, in another model with the same modules, for
    example one in float32. Infinite if it is not finite there either; None if there is no such tensor."""
    largest: list[float] = []

    def look(found: str, tensor: Tensor) -> None:
        if found == name and tensor.is_floating_point() and tensor.numel():
            size = float(tensor.detach().abs().max())
            largest.append(size if size == size else float("inf"))  # a NaN is not finite either

    _step(model, loss, look)
    return max(largest, default=None)


def _step(
    model: nn.Module,
    loss: Callable[[], Tensor],
    look: Callable[[str, Tensor], None],
    goes_back: Callable[[], bool] = lambda: True,
) -> None:
    """Call `look` with every tensor of a forward and, if `goes_back()` is true after it, of a backward."""
    with _without_gradients(model), _watched(model, look):
        value = loss()
        look("the loss", value)
        if goes_back():
            value.backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                look(f"gradient of the weight {name}", parameter.grad)


@contextmanager
def _watched(model: nn.Module, look: Callable[[str, Tensor], None]) -> Iterator[None]:
    """A context in which `look` is called with the inputs and outputs of every module, and their gradients, with
    names."""

    def attach(what: str, name: str, value: Any) -> None:
        for tensor in tensors_in(value):
            look(f"{what} of {name}", tensor)
        take_gradients(value, lambda grad: look(f"gradient of the {what} of {name}", grad))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            at = f"{name or 'the model'} ({type(module).__name__})"
            hooks.enter_context(module.register_forward_pre_hook(lambda _, inputs, at=at: attach("input", at, inputs)))
            hooks.enter_context(module.register_forward_hook(lambda _, __, output, at=at: attach("output", at, output)))
        yield


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """A context in which the parameters have no gradients; they are restored afterwards."""
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in kept.items():
            put_back(parameter, grad)


def _finite(tensor: Tensor) -> bool:
    values = tensor.detach()
    values = values.float() if values.dtype.itemsize == 1 else values  # torch has no isfinite for codes
    return not tensor.is_floating_point() or bool(values.isfinite().all())


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a module's input or output: dicts, lists and tuples, nested."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def take_gradients(value: Any, take: Callable[[Tensor], None]) -> None:
    """Call `take` with the gradients of the tensors in a module's input or output, when the backward computes them."""
    for tensor in tensors_in(value):
        if tensor.requires_grad:
            tensor.register_hook(take)  # type: ignore[no-untyped-call]


@contextmanager
def activation_gradients(model: nn.Module, enabled: bool = True) -> Iterator[list[Tensor]]:
    """A context in which a backward appends the gradients of every leaf module's outputs to the list."""
    collected: list[Tensor] = []
    with _hooked(model if enabled else None, lambda name, grad: collected.append(grad)):
        yield collected


@contextmanager
def activation_gradients_by_module(model: nn.Module, enabled: bool = True) -> Iterator[dict[str, list[Tensor]]]:
    """The same, by the module's name; for a model that is a single leaf, under "the model"."""
    collected: dict[str, list[Tensor]] = {}
    with _hooked(model if enabled else None, lambda name, grad: collected.setdefault(name, []).append(grad)):
        yield collected


@contextmanager
def _hooked(model: nn.Module | None, take: Callable[[str, Tensor], None]) -> Iterator[None]:
    def attach(path: str, outputs: list[Tensor]) -> None:
        take_gradients(outputs, lambda grad: take(path or "the model", grad.detach().clone()))

    leaves = [] if model is None else [pair for pair in model.named_modules() if not any(pair[1].children())]
    with outputs_seen(leaves, attach):
        yield


@contextmanager
def outputs_seen(modules: Iterable[tuple[str, nn.Module]], see: Callable[[str, list[Tensor]], None]) -> Iterator[None]:
    """A context in which `see` is called with the outputs of these modules: path, and tensors."""
    with ExitStack() as hooks:
        for path, module in modules:
            seen = module.register_forward_hook(lambda _, __, output, path=path: see(path, tensors_in(output)))
            hooks.enter_context(seen)
        yield
