"""Weights that rules round, kept as codes times one power of two, and their gradients with them.

The parameter holds the codes and a buffer beside it the scale: the forward multiplies, and state dicts hold the values,
under the stock names. Only an optimizer that knows the scales may step on the codes (`halfstep.prepare`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep import ops
from halfstep.errors import ModelError, RecipeError
from halfstep.nn.adopt import extend
from halfstep.recipe import SCALED, Scaled


_SCALE = "_halfstep_weight_scale"
_ANCHOR = "_halfstep_weight_gradient"
_HELD = "_halfstep_held"


def hold(model: nn.Module, paths: Sequence[str], scaled: Scaled) -> dict[nn.Parameter, Tensor | None]:
    """Keep the weights of those layers as `scaled` says; their scales, for the optimizer.

    A weight that other modules share stays as it is, since those would read codes; so does that of a layer whose
    parent's forward reads a weight (T5 casts to its dtype), and fused ones (attention, experts). Where there is more
    than one rank, a weight takes the rounded values in its own dtype, with None for a scale: gradients have to cross
    the network unrounded, and torch wants them in the parameter's dtype.

    Raises:
        ModelError: a weight is sharded. Nothing was changed.
    """
    readers = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    scales: dict[nn.Parameter, Tensor | None] = {}
    for path in paths:
        if hasattr(getattr(model.get_submodule(path), "weight", None), "device_mesh"):
            raise ModelError(
                f"{type(model).__name__}: {path}.weight is sharded, and this recipe keeps it as codes times one scale, "
                "which no rank has the whole of. Under fully_shard take a recipe whose weights are values "
                "('fp8-delayed', 'fp8-current')"
            )
    for path in paths:
        module = model.get_submodule(path)
        weight = module._parameters.get("weight")
        if weight is not None and is_held(module):  # for another optimizer of this model
            scales[weight] = module._buffers[_SCALE]
            continue
        read = bool(path) and _reads_weights(model.get_submodule(path.rpartition(".")[0]))
        if weight is None or read or readers[id(weight)] > 1:
            continue
        codes, scale = ops.encode_scaled(weight.detach(), SCALED[scaled.weights])
        if ranks() > 1:
            weight.data.copy_(ops.decode_scaled(codes, scale))
            scales[weight] = None
            continue
        grad, weight.grad = weight.grad, None
        weight.data = codes
        module.register_buffer(_SCALE, scale, persistent=False)
        anchor = torch.zeros((), device=weight.device).expand(weight.shape).requires_grad_()
        module.register_buffer(_ANCHOR, anchor, persistent=False)
        extend(module, _members)
        held = _Held(SCALED[scaled.grads])
        setattr(module, _HELD, held)
        held.attach(module)
        weight.grad = None if grad is None else ops.encode_grad(grad, held.grads)
        scales[weight] = scale
    return scales


def _reads_weights(parent: nn.Module) -> bool:
    """Whether the forward of a layer's parent names a weight itself, and does more than call its parts."""
    code = getattr(inspect.unwrap(type(parent).forward), "__code__", None)
    return not isinstance(parent, nn.TransformerEncoderLayer) and (code is None or "weight" in code.co_names)


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def held_weight(module: Any) -> Tensor:
    """The weight of a layer as its product takes it: the values, where it holds codes.

    A traced graph casts gradients to their parameter's dtype, whatever that accepts: there, the gradient goes to zeros
    in float32, four bytes in all, which hand it on.
    """
    weight, scale = module.weight, module._buffers.get(_SCALE)
    if scale is None:
        return weight  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        values = ops.decode_scaled(weight.detach(), scale)
        return values + module._buffers[_ANCHOR] if weight.requires_grad else values
    return ops.values_of(weight, scale)


def is_held(module: nn.Module) -> bool:
    """Whether the module's weight holds codes."""
    return _HELD in vars(module)


def let_go(module: nn.Module) -> None:
    """Give a held weight its values back, in float32, and its gradient."""
    weight: Any = module.weight
    vars(module).pop(_HELD).detach()
    grad, weight.grad = weight.grad, None
    weight.data = ops.decode_scaled(weight.data, module._buffers[_SCALE])  # type: ignore[arg-type]
    weight.grad_dtype = torch.float32
    weight.grad = None if grad is None else ops.grad_values(grad)
    delattr(module, _SCALE)
    delattr(module, _ANCHOR)


class _Held:
    """Keeps the gradient of one weight as codes: one that is there is decoded, added to and encoded again."""

    def __init__(self, grads: torch.dtype) -> None:
        self.grads = grads
        self._handles: list[RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"grads": self.grads, "_handles": []}  # hooks stay with the parameter they were made for

    def attach(self, module: Any) -> None:
        weight = module.weight
        weight.grad_dtype = None

        def with_earlier(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            if grads[0] is None:  # of a traced graph, whose gradient went to the anchor
                return grads
            if ranks() > 1:
                raise RecipeError(
                    "this model's weights are codes, whose gradients do not cross the network: call "
                    "torch.distributed.init_process_group before halfstep.prepare"
                )
            earlier, weight.grad = weight.grad, None
            return grads if earlier is None else (ops.grad_values(earlier) + grads[0],)

        def encode(weight: Any) -> None:
            if weight.grad is not None and not ops.is_encoded(weight.grad):
                weight.grad = ops.encode_grad(weight.grad, self.grads)

        def hand_on(anchor: Tensor) -> None:
            grad, anchor.grad = anchor.grad, None
            (weight.grad,) = with_earlier((grad,))
            encode(weight)

        trained = weight.requires_grad
        weight.requires_grad_()  # or torch takes no hooks, and somebody may unfreeze it later
        self._node = torch.autograd.graph.get_gradient_edge(weight).node  # torch drops one that nobody holds
        self._handles = [
            self._node.register_prehook(with_earlier),
            weight.register_post_accumulate_grad_hook(encode),
            module._buffers[_ANCHOR].register_post_accumulate_grad_hook(hand_on),
        ]
        weight.requires_grad_(trained)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


def _members(stock: type[nn.Module]) -> dict[str, Any]:
    """State dicts of values, and gradients as codes in deep copies too: torch copies no hooks."""

    def _save_to_state_dict(module: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        stock._save_to_state_dict(module, destination, prefix, keep_vars)
        destination[prefix + "weight"] = ops.decode_scaled(module.weight.detach(), module._buffers[_SCALE])

    def _load_from_state_dict(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key = prefix + "weight"
        value = state_dict.get(key)
        if isinstance(value, Tensor) and value.shape == module.weight.shape:
            codes, scale = ops.encode_scaled(value.detach(), module.weight.dtype)
            module._buffers[_SCALE].copy_(scale)
            state_dict = {**state_dict, key: codes}
        stock._load_from_state_dict(module, state_dict, prefix, *rest)

    def __setstate__(module: Any, state: dict[str, Any]) -> None:
        stock.__setstate__(module, state)  # type: ignore[no-untyped-call]
        vars(module)[_HELD].attach(module)

    return {
        "_save_to_state_dict": _save_to_state_dict,
        "_load_from_state_dict": _load_from_state_dict,
        "__setstate__": __setstate__,
    }
