"""Weights that rules round, kept as codes, and their gradients with them: how parameters become so, and stop."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.nn.adopt import extend
from halfstep.nn.paths import same_parameters
from halfstep.ops.code_tensor import CodeTensor, parameter, round_gradient, round_gradients
from halfstep.ops.snapshot import snapshot
from halfstep.recipe import Codes


def hold(model: nn.Module, names: Sequence[str], codes: Codes) -> None:
    """Keep those parameters and their gradients as `codes` says. They stay the same objects; what is no parameter any
    more, since it is computed (a parametrization), stays as it is.

    Raises:
        ModelError: a weight is sharded. Nothing was changed.
    """
    weights: dict[int, nn.Parameter] = {}
    for weight, name in same_parameters(model, names):
        if hasattr(weight, "device_mesh"):
            raise ModelError(
                f"{type(model).__name__}: {name} is sharded, and this recipe keeps it as codes with "
                "scales, of which no rank has the whole. Under fully_shard take a recipe whose weights are values "
                "('fp8-delayed', 'fp8-current')"
            )
        if not isinstance(weight, CodeTensor):  # another optimizer of this model has made it one
            weights[id(weight)] = weight
    for weight in weights.values():
        coded: Any = parameter(CodeTensor.encode(weight, codes.weights.quantizer), weight.requires_grad)
        _become(weight, coded, vars(weight))
        if codes.grads is not None:
            round_gradients(weight, codes.grads.quantizer)  # type: ignore[arg-type]
    for module in model.modules():
        if any(id(p) in weights for p in module._parameters.values()):
            extend(module, _members)
    if weights:
        extend(model, _asking_first)


def let_go(model: nn.Module) -> None:
    """Give weights that are codes their values back, and their gradients."""
    for weight in list(model.parameters()):
        if isinstance(weight, CodeTensor):
            own = vars(parameter(CodeTensor.encode(weight.values(), weight.quantizer)))
            kept = {name: value for name, value in vars(weight).items() if name not in own}
            _become(weight, nn.Parameter(weight.values(), weight.requires_grad), kept)


def _become(weight: Any, other: Any, attributes: dict[str, Any]) -> None:
    """Give a parameter the contents of another, which is not used elsewhere, and those attributes; its gradient, hooks
    and references to it stay.

    As torch.utils.swap_tensors, which refuses a tensor with weak references: to us they are to the parameter, whatever
    it holds. A graph that knows the old contents refuses its backward pass.
    """
    grad, weight.grad = weight.grad, None
    hooks, after = weight._backward_hooks, weight._post_accumulate_grad_hooks
    if weight._use_count() > 1 and weight.requires_grad and weight.is_leaf:
        torch.autograd.graph.get_gradient_edge(weight).node.register_prehook(_refuse)
    attributes = {**vars(other), **attributes}
    weight.__class__, other.__class__ = type(other), type(weight)
    weight.__dict__, other.__dict__ = attributes, {}
    torch._C._swap_tensor_impl(weight, other)
    weight._backward_hooks = hooks
    for key in [key for key, hook in (after or {}).items() if hook is round_gradient]:
        del after[key]
    weight._post_accumulate_grad_hooks = after
    if grad is not None:
        weight.grad = grad.values() if isinstance(grad, CodeTensor) else grad


def _refuse(grads: Any) -> NoReturn:
    raise ModelError(
        "a backward pass goes through a forward pass of before a weight became codes (halfstep.prepare) or values "
        "again (halfstep.revert), which its gradient would no longer reach: run the forward again"
    )


def _members(stock: type[nn.Module]) -> dict[str, Any]:
    """State dicts of values, as a stock model's; and conversions that know codes."""

    def _save_to_state_dict(module: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        stock._save_to_state_dict(module, destination, prefix, keep_vars)
        for name, weight in module._parameters.items():
            if isinstance(weight, CodeTensor) and not keep_vars:
                destination[prefix + name] = snapshot(weight)

    def _apply(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        held = {name: p for name, p in module._parameters.items() if isinstance(p, CodeTensor)}
        module._parameters.update(dict.fromkeys(held))
        try:
            stock._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            module._parameters.update(held)
        for name, weight in held.items():
            _convert(weight, name, fn)
        return module  # type: ignore[no-any-return]

    return {"_save_to_state_dict": _save_to_state_dict, "_apply": _apply}


def _asking_first(stock: type[nn.Module]) -> dict[str, Any]:
    """A model that asks, before any part of it is converted, whether its codes can be."""

    @torch.no_grad()
    def _apply(model: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, weight in model.named_parameters():
            if isinstance(weight, CodeTensor):
                _check(weight, name, fn(torch.empty(0, dtype=weight.dtype, device=weight.device)))
        stock._apply(model, fn, recurse)  # type: ignore[no-untyped-call]
        return model  # type: ignore[no-any-return]

    return {"_apply": _apply}


def _check(weight: CodeTensor, name: str, converted: Tensor) -> None:
    if converted.dtype != weight.dtype:
        raise ModelError(
            f"{name} is stored as {weight.quantizer.format.name} codes, and would become {converted.dtype}: cast the "
            "model before halfstep.prepare, or halfstep.revert it first"
        )


@torch.no_grad()
def _convert(weight: Any, name: str, fn: Callable[[Tensor], Tensor]) -> None:
    """What `model.to(...)` and its kin do to a weight of codes.

    Raises:
        ModelError: it would get another dtype.
    """
    new = fn(weight)
    _check(weight, name, new)
    if new is weight:
        return
    if new.device == weight.device:
        weight.write(new)
        return
    grad = None if weight.grad is None else fn(weight.grad)
    quantizer, weight.grad = weight.grads, None
    codes = parameter(CodeTensor.encode(new, weight.quantizer), weight.requires_grad)
    _become(weight, codes, {k: v for k, v in vars(weight).items() if k not in vars(codes)})
    weight.grad = grad
    if quantizer is not None:
        round_gradients(weight, quantizer)
