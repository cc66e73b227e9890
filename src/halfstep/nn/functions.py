"""Functions that compute in float32 under autocast, by a recipe's own list; and a model's outputs in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from itertools import takewhile
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from halfstep.errors import ModelError


_OPERATORS = {"pow": ("__pow__", "__rpow__", "float_power"), "reciprocal": ("__rtruediv__", "__rdiv__")}
"""What else calls a function of that name."""


class Float32Functions(TorchFunctionMode):
    """Within it, functions of those names, and methods, take 16-bit inputs widened to float32 and return float32.

    As with torch.autocast, calls in place, with `out=` or with a `dtype` of their own are left alone.

    Args:
        part: the forward of a part that enters this mode again where it is computed again (activation checkpointing);
            None in a traced graph, which has no such code.

    Raises:
        ModelError: where it is called, code between parts will be computed again without this mode.
    """

    def __init__(self, names: Iterable[str], part: Callable[..., Any] | None) -> None:
        super().__init__()
        self._part = part.__code__ if part is not None and torch.is_grad_enabled() else None
        self.names = frozenset(other for name in names for other in (name, *_OPERATORS.get(name, ())))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        says_where = kwargs.get("dtype") is not None or kwargs.get("out") is not None
        if getattr(func, "__name__", "") in self.names and not says_where:
            if self._part is not None and not torch.is_grad_enabled():
                self._check_recomputed(func)
            args, kwargs = tree_map_only(Tensor, _widened, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def _check_recomputed(self, func: Callable[..., Any]) -> None:
        """Refuse a call under torch's reentrant checkpointing, which a mode can see in the call stack alone."""
        for frame, _ in takewhile(lambda called: called[0].f_code is not self._part, walk_stack(None)):
            if frame.f_code is CheckpointFunction.forward.__code__:
                raise ModelError(
                    f"{func.__name__} is called under torch.utils.checkpoint with use_reentrant=True, by code between "
                    "modules: the recipe computes it in float32, and the second time, in the backward pass, nothing "
                    "would. Take use_reentrant=False with context_fn=lambda: (nullcontext(), "
                    "halfstep.following(model)), or checkpoint a module that calls it"
                )


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def to_float32(output: Any) -> Any:
    """The same structure with every 16-bit floating tensor in float32: tuples, named tuples, lists, dicts, dataclasses,
    torch.distributions.

    A loss on the outputs is then computed in float32. Other objects (a key-value cache, say) pass untouched.
    """
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, (tuple, list)):
        made = map(to_float32, output)
        return type(output)(*made) if hasattr(output, "_fields") else type(output)(made)
    if isinstance(output, MutableMapping):  # Hugging Face's ModelOutput, also a dataclass, keeps both views in step
        result = copy.copy(output)
        for key, value in output.items():
            result[key] = to_float32(value)
        return result
    if isinstance(output, Mapping):
        return type(output)({key: to_float32(value) for key, value in output.items()})  # type: ignore[call-arg]
    names: list[str] = []
    if is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in fields(output)]
    elif isinstance(output, Distribution):  # made of tensors, and of other distributions
        names = [*vars(output)]
    widened = copy.copy(output) if names else output
    for name in names:
        object.__setattr__(widened, name, to_float32(getattr(output, name)))
    return widened


def device_type_of(module: nn.Module) -> str:
    """The type of the device of its first parameter, or of its first buffer where it has none."""
    for held in ("_parameters", "_buffers"):
        waiting = [module]
        while waiting:  # torch finds names too, which takes longer than a layer
            inner = waiting.pop()
            for tensor in getattr(inner, held).values():
                if tensor is not None:
                    return str(tensor.device.type)
            waiting += [child for child in reversed(inner._modules.values()) if child is not None]
    raise ModelError(f"{type(module).__name__} has neither parameters nor buffers, and so no device")
