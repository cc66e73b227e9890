"""The forwards of a unit-scaled model: of modules that are one operation, and of modules with code of their own.

torch's modules are recognized by their class. Others, such as Hugging Face's hand-written norms and activations, are
recognized by their results on random inputs, not by their names.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from halfstep.errors import ModelError
from halfstep.nn.adapters import convolution, linear
from halfstep.nn.adopt import twin
from halfstep.nn.attention import DotProductAttention
from halfstep.nn.layers import kind_of
from halfstep.nn.unit.functions import ATTENTION, activation, canonical, counts, named, signature
from halfstep.ops.plain import scale_backward, scaled, weighted_sum
from halfstep.unit.activations import IN_PLACE, times, value
from halfstep.unit.roles import unit_part


# ---- modules that are one operation ----------------------------------------------------------------------------------

PRODUCTS = linear.LINEAR, linear.CONV1D, convolution.CONVOLUTION
NORMS: dict[type[nn.Module], str] = {
    nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm", nn.GroupNorm: "group_norm", nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm", nn.BatchNorm3d: "batch_norm",
}  # fmt: skip
_SILENT = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity, nn.Sequential, nn.ModuleList,
    nn.ModuleDict, nn.Flatten, nn.Unflatten,
)  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """The operation of a module that is only one operation."""

    kind: str
    """`product`, `embedding`, `norm`, `elementwise` or `attention`."""
    name: str
    """The operation; for norms `layer_norm`, `rms_norm`, `group_norm` or `batch_norm`."""
    eps: float = 0.0
    """The epsilon of a hand-written norm."""
    activation: str = ""
    """The name in `unit.activations.IN_PLACE`, if it is one of these."""


def leaf_of(module: nn.Module) -> Leaf | None:
    """The operation that the module is; None if it is more than one, or another."""
    stock = "forward" not in vars(module)
    kind = kind_of(module)
    if kind is not None and kind in PRODUCTS:
        return Leaf("product", kind.name)
    if isinstance(module, nn.Embedding):
        plain = stock and type(module).forward is nn.Embedding.forward and module.max_norm is None
        return Leaf("embedding", "embedding") if plain else None
    if isinstance(module, DotProductAttention):
        return Leaf("attention", "scaled_dot_product_attention")
    for norm, name in NORMS.items():
        if isinstance(module, norm):
            return Leaf("norm", name) if stock and type(module).forward is norm.forward else None
    if isinstance(module, _SILENT) or next(module.children(), None) is not None:
        return None
    return _measured_norm(module) or _measured_elementwise(module)


def _measured_norm(module: nn.Module) -> Leaf | None:
    """The module as a norm over the last dimension, if it computes one on random weights and inputs; else None."""
    parameters = {name: p for name, p in module.named_parameters() if p is not None}
    if parameters.keys() not in ({"weight"}, {"weight", "bias"}) or any(p.dim() != 1 for p in parameters.values()):
        return None
    size, generator = parameters["weight"].numel(), torch.Generator().manual_seed(0)
    draw = {name: torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for name in parameters}
    small = torch.randn(3, 5, size, generator=generator, dtype=torch.float32, device="cpu")
    inputs = small * 3 + 1, small * 1e-3
    norms: dict[str, Any] = {"layer_norm": partial(F.layer_norm, bias=draw.get("bias"))}
    norms |= {} if "bias" in draw else {"rms_norm": F.rms_norm}
    for eps in {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.1}:
        for name, norm in norms.items():
            expected = [norm(x, (size,), weight=draw["weight"], eps=eps) for x in inputs]
            if _computes(module, draw, inputs, expected):
                return Leaf("norm", name, eps)
    return None


def _computes(module: nn.Module, weights: dict[str, Tensor], inputs: Any, expected: Any) -> bool:
    found = [_called(module, weights, x) for x in inputs]
    return all(
        isinstance(y, Tensor) and y.shape == z.shape and torch.allclose(y.float(), z, rtol=1e-4, atol=1e-5)
        for y, z in zip(found, expected, strict=True)
    )


def _measured_elementwise(module: nn.Module) -> Leaf | None:
    """The module as an elementwise function, if its results on the same elements in another order and shape are the
    same; else None."""
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return None
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.int64, device="cpu")
    first, again, other = (_called(module, {}, each) for each in (x, x, x.flatten()[order].view(4, 3, 8)))
    if not all(isinstance(y, Tensor) and y.is_floating_point() for y in (first, again, other)):
        return None
    if first.shape != x.shape or other.shape != (4, 3, 8) or torch.equal(first, x) or not torch.equal(first, again):
        return None
    if not _same(first.flatten()[order], other.flatten()):
        return None
    return Leaf("elementwise", type(module).__name__, activation=_activation(module))


def _activation(module: nn.Module) -> str:
    """The name in `IN_PLACE` of an elementwise module's function, compared on [-100, 100]; empty if there is none, or
    if the module writes to its input, which other code may use."""
    x = torch.linspace(-100, 100, 2**12, dtype=torch.float32, device="cpu")
    y = _called(module, {}, x)
    known = (name for name in IN_PLACE if isinstance(y, Tensor) and _same(y, value(x, name)))
    return "" if getattr(module, "inplace", False) else next(known, "")


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=1e-5, atol=1e-6)


def _called(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Any:
    """The module's output for x with the given weights, without its hooks; random states are not changed. None if it
    raises."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            return functional_call(_without_hooks(module), weights, (x.clone(),))
        except Exception:  # it is no function of one tensor
            return None


def _without_hooks(module: nn.Module) -> nn.Module:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    others: dict[str, Any] = {**{name: {} for name in hooks}, "_parameters": dict(module._parameters)}
    return twin(module, type(module), **others)


def measured(function: Any, size: float) -> tuple[float, float, float]:
    """The standard deviation of f(z), the root mean square of f'(z) and the mean square of f(z), for a scalar z from
    N(0, size^2): sums over 2^14 quantiles in float64."""
    count = 2**14
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        levels = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
        z = (torch.erfinv(2 * levels - 1) * math.sqrt(2) * size).float().requires_grad_()
        y = function(z.clone())
        (slope,) = torch.autograd.grad(y.sum(), z)
    y = y.detach().double()
    mean, square = y.mean(), y.square().mean()
    deviation = math.sqrt(max(float(square - mean.square()), 0.0))
    return deviation, float(slope.double().square().mean().sqrt()), float(square)


# ---- modules with code of their own ----------------------------------------------------------------------------------

PASSIVE = "passive"


@dataclass(frozen=True)
class Step:
    """One call of a torch function in a module's own code, with its scaling factors."""

    kind: str
    """The function that scales it (a key of `_RUN`); `passive` calls are not scaled."""
    call: str
    """The signature by which it is recognized (`functions.signature`)."""
    function: str
    """Its canonical name."""
    alpha: float = 1.0
    """The factor of its output."""
    backward: tuple[tuple[int, float], ...] = ()
    """The total factors of its operands' gradients, by index among the flattened arguments."""
    in_place: bool = False
    """Whether it writes to its first operand."""
    numbers: tuple[float, ...] = ()
    """For an addition, the operands' factors; for attention, those of the scores and the bias."""

    @property
    def is_forward(self) -> bool:
        """Whether it scales values, and not gradients alone."""
        return self.kind != PASSIVE and (self.alpha != 1 or bool(self.numbers))


@dataclass(frozen=True)
class Own:
    """The calls in a module's own code, in order, without those of its children."""

    path: str
    steps: tuple[Step, ...]


class Running(TorchFunctionMode):
    """A function mode that scales the functions that a module's own code calls, by its list of steps.

    Each call of a module enters a new one, so that recomputation by activation checkpointing works.

    Raises:
        ModelError: the code calls other functions, or in another order, than when it was traced.
    """

    def __init__(self, own: Own) -> None:
        super().__init__()
        self._own, self._grad, self._at = own, torch.is_grad_enabled(), 0
        self._names = frozenset([s.function for s in own.steps if s.is_forward or (self._grad and s.kind != PASSIVE)])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(x, (Tensor, tuple, list)) for x in args) and not kwargs.get("input", None) is not None:
            return func(*args, **kwargs)  # a factory function: the default device is another function mode
        name = canonical(func, args)
        with torch._C.DisableTorchFunction():  # the modes of enclosing modules do not see it
            if name not in self._names or not counts(args, kwargs):
                return func(*args, **kwargs)
            step = self._next(signature(name, args))
            return _RUN[step.kind](step, func, args, kwargs)

    def _next(self, call: str) -> Step:
        for i in range(self._at, len(self._own.steps)):
            step = self._own.steps[i]
            if step.call == call:
                self._at = i + 1
                return step
            if not self._may_skip(step):
                raise self._other(f"it calls {call}", step.call)
        raise self._other(f"it calls {call}", "nothing more of that kind")

    def _may_skip(self, step: Step) -> bool:
        return step.kind == PASSIVE or step.function not in self._names or not (self._grad or step.is_forward)

    def finish(self) -> None:
        """Called when the module's forward has returned: raises if a scaled call is missing."""
        for step in self._own.steps[self._at :]:
            if not self._may_skip(step):
                raise self._other("it ended", step.call)

    def _other(self, found: str, expected: str) -> ModelError:
        return ModelError(
            f"{self._own.path or 'the model'}: its code computes otherwise than when halfstep.unit_scale traced it: "
            f"{found} where the trace has {expected}. Its control flow depends on its inputs or modes: revert the "
            "model, and give unit_scale inputs like those it is called with (masks, labels)"
        )


def _weighted(step: Step, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An addition or subtraction as w_a a + w_b b, with factors of their own for the gradients."""
    backward = dict(step.backward)
    a, b = args[:2]
    signs = (1.0, 1.0)
    if step.function == "sub":
        signs = (-1.0, 1.0) if getattr(func, "__name__", "") == "__rsub__" else (1.0, -1.0)
    numbers = step.numbers[0] * signs[0], step.numbers[1] * signs[1]
    grads = backward.get(0, 1.0) * signs[0], backward.get(1, 1.0) * signs[1]
    y = weighted_sum(a, b, numbers, grads)
    return a.copy_(y) if step.in_place else y


def _scale(step: Step, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A multiplication by a constant, replaced by the constant's sign."""
    x = next(x for x in args[:2] if isinstance(x, Tensor) and (x.dim() > 0 or not isinstance(args[1], Tensor)))
    sign = step.numbers[0]
    return scaled(x, sign, sign * (step.backward[0][1] if step.backward else 1.0))


def _matmul(step: Step, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    backward = dict(step.backward)
    a, b = args[:2]
    output = math.prod(a.shape[:-1]) * b.shape[-1]
    a, b = (
        scale_backward(a, backward.get(0, step.alpha) / step.alpha),
        scale_backward(b, backward.get(1, step.alpha) / step.alpha),
    )
    least = min(a.numel(), b.numel(), output)  # one pass over the smallest of the three
    if least == a.numel():
        return func(a * step.alpha, b, *args[2:], **kwargs)
    if least == b.numel():
        return func(a, b * step.alpha, *args[2:], **kwargs)
    return func(a, b, *args[2:], **kwargs) * step.alpha


def _attention(step: Step, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given, alpha, backward = named(ATTENTION, args, kwargs), step.alpha, dict(step.backward)
    for i, name in enumerate(ATTENTION[:3]):
        given[name] = scale_backward(given[name], backward.get(i, alpha) / alpha)
    if len(step.numbers) > 1:
        given["attn_mask"] = scaled(given["attn_mask"], step.numbers[1], step.numbers[1] * step.numbers[2])
    return func(**{**given, "scale": step.numbers[0]}) * alpha


def _elementwise(step: Step, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    factors = step.alpha, step.backward[0][1]
    if step.in_place:
        x: Tensor = args[0]
        return x.copy_(scaled(func(x.clone(), *args[1:], **kwargs), *factors))
    if (name := activation(step.function, args, kwargs)) is not None:
        return times(args[0], name, *factors)
    return scaled(func(*args, **kwargs), *factors)


def _reduction(step: Step, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A loss or a mean, unscaled: the factor of its operand's gradient is applied to the output's gradient, which is
    smaller."""
    return scale_backward(func(*args, **kwargs), step.backward[0][1])


def _gradients(step: Step, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The function with factors on its output and on its operands' gradients."""
    leaves, tree = tree_flatten((args, dict(kwargs)))
    for place, factor in step.backward:
        leaves[place] = scale_backward(leaves[place], factor / step.alpha)
    args, kwargs = tree_unflatten(leaves, tree)
    y = func(*args, **kwargs)
    return y if step.alpha == 1 else y * step.alpha


_RUN: dict[str, Callable[..., Any]] = {
    PASSIVE: lambda step, func, args, kwargs: func(*args, **kwargs),
    "add": _weighted,
    "scale": _scale,
    "matmul": _matmul,
    "attention": _attention,
    "elementwise": _elementwise,
    "reduction": _reduction,
    "gradients": _gradients,
}


# ---- forwards of modules ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """The factors of a module that is one operation."""

    name: str
    """The operation: for norms `layer_norm`, `rms_norm`, `group_norm`, `batch_norm`; for functions their name."""
    alpha: float
    """The factor of its output."""
    backward: tuple[float, ...]
    """The total factors of its inputs' gradients."""
    eps: float = 0.0
    free: bool = False
    """Whether the gradients of gain and bias have the factor rows^-1/2."""
    beside: float = 1.0
    """A further factor of the gradients of gain and bias."""


def own(stock: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, whose function calls are scaled."""
    running = Running(unit_part(module).forward)
    with running:
        output = stock(module, *args, **kwargs)
    running.finish()
    return output


@dataclass(frozen=True)
class Shield:
    """Members of a module that is one operation: `__call__` that hides its functions from enclosing function modes."""

    beneath: bool = True

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        call: Any = stock.__call__

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return call(self, *args, **kwargs)

        return {"__call__": __call__}


@dataclass(frozen=True)
class Unsaved:
    """Members of a Hugging Face model: `save_pretrained` raises, since stock models misread unit-scaled weights."""

    beneath: bool = True

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            raise ModelError(
                f"{type(self).__name__}.save_pretrained: the weights are unit-scaled, and a plain from_pretrained "
                "would compute something else with them. Save model.state_dict() (torch.save, safetensors), and load "
                "it into a model that halfstep.unit_scale was called on with inputs like these"
            )

        return {"save_pretrained": save_pretrained, "push_to_hub": save_pretrained}


def one_input(stock: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of an embedding or an elementwise function, with factors on the output and on its gradient."""
    plan: Whole = unit_part(module).forward
    if plan.name in IN_PLACE:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        return times(x, plan.name, plan.alpha, plan.backward[0])
    return scaled(stock(module, *args, **kwargs), plan.alpha, plan.backward[0])


def attention(stock: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention module, with a factor on its output, and on the gradients of its inputs."""
    plan: Whole = unit_part(module).forward
    given = named(("query", "key", "value", "mask", "is_causal"), args, kwargs)
    for name, factor in zip(("query", "key", "value"), plan.backward, strict=True):
        given[name] = scale_backward(given[name], factor / plan.alpha)
    return stock(module, **given) * plan.alpha


def norm(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a norm, with factors on the gradients of its input, gain and bias."""
    plan: Whole = unit_part(module).forward
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    x = scale_backward(x, plan.backward[0])
    weight, bias = (_parameter(module, name, x, plan) for name in ("weight", "bias"))
    kind = next((kind for kind in type(module).__mro__ if kind in NORMS), None)
    if kind is not None:
        return kind.forward(twin(module, kind, _parameters={"weight": weight, "bias": bias}), x)
    shape = tuple(x.shape[-1:])  # written by hand
    if plan.name == "rms_norm":
        return F.rms_norm(x, shape, weight, plan.eps)
    return F.layer_norm(x, shape, weight, bias, plan.eps)


def _parameter(module: Any, name: str, x: Tensor, plan: Whole) -> Tensor | None:
    """A gain or bias, cast to the wider dtype of itself and x, with the factor of its gradient; None if missing."""
    parameter = getattr(module, name, None)
    if parameter is None:
        return None
    dtype = torch.promote_types(parameter.dtype, x.dtype)
    rows = x.numel() / max(parameter.numel(), 1)
    factor = plan.beside * (max(rows, 1.0) ** -0.5 if plan.free else 1.0)
    return scale_backward(parameter.to(dtype), factor)


WHOLE = {"norm": norm, "embedding": one_input, "elementwise": one_input, "attention": attention}
"""The forwards of modules that are one operation, by kind; layers with matmuls use their adapter's."""
