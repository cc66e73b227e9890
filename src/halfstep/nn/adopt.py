"""Give a module another forward without making it another module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn


Forward = Callable[..., Any]
"""forward(stock_forward, module, *args, **kwargs) -> what the module returns"""
OnCopy = Callable[[nn.Module], None]
Members = tuple[tuple[str, Any], ...]


def adopt(module: nn.Module, forward: Forward | None, on_copy: OnCopy | None = None, members: Members = ()) -> None:
    """Make `module` call `forward`, by giving it a subclass of its own class.

    Parameters, names, ties, hooks, state-dict keys and `isinstance` keep their identity; the class keeps its name,
    which Hugging Face writes into config.json, and `forward` its signature. `release` undoes it exactly. `on_copy` is
    called with every deep copy of the module, for what torch does not copy. `members` are further attributes of the
    class; without a `forward` it keeps its own.
    """
    module.__class__ = _subclass(type(module), forward, on_copy, members)  # type: ignore[arg-type]


def release(module: nn.Module) -> None:
    """Give `module` back the class it had before every `adopt`."""
    while (stock := vars(type(module)).get("_halfstep_stock")) is not None:
        module.__class__ = stock


@cache
def _subclass(
    stock: type[nn.Module], forward: Forward | None, on_copy: OnCopy | None, given: Members
) -> type[nn.Module]:
    # One class for each pair, so that modules of a kind stay of one kind (torch.compile guards on it).
    members: dict[str, Any] = {
        **dict(given),
        "_halfstep_stock": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    if forward is not None:
        stock_forward = stock.forward

        @wraps(stock_forward)
        def adopted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(stock_forward, self, *args, **kwargs)

        members["forward"] = adopted
    if on_copy is not None:

        def __setstate__(self: nn.Module, state: dict[str, Any]) -> None:
            stock.__setstate__(self, state)  # type: ignore[no-untyped-call]
            on_copy(self)

        members["__setstate__"] = __setstate__
    return type(stock.__name__, (stock,), members)
