"""Give a module another forward, or other methods, without making it another module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn


Forward = Callable[..., Any]
"""forward(stock_forward, module, *args, **kwargs) -> what the module returns"""
OnCopy = Callable[[nn.Module], None]
Members = Callable[[type[nn.Module]], dict[str, Any]]
"""members(stock class) -> what the subclass has in the place of the stock class's own"""


def adopt(module: nn.Module, forward: Forward, on_copy: OnCopy | None = None) -> None:
    """Make `module` call `forward`, by giving it a subclass of its own class.

    Parameters, names, ties, hooks, state-dict keys and `isinstance` keep their identity; the class keeps its name,
    which Hugging Face writes into config.json, and `forward` its signature. `release` undoes it exactly. `on_copy` is
    called with every deep copy of the module, for what torch does not copy.
    """
    extend(module, _calling(forward, on_copy))


def extend(module: nn.Module, members: Members) -> None:
    """Give `module` a subclass of its own class with those members; one subclass for each pair of the two."""
    module.__class__ = _subclass(type(module), members)  # type: ignore[arg-type]


def release(module: nn.Module) -> None:
    """Give `module` back the class it had before every `adopt` and `extend`."""
    while (stock := vars(type(module)).get("_halfstep_stock")) is not None:
        module.__class__ = stock


@cache
def _subclass(stock: type[nn.Module], members: Members) -> type[nn.Module]:
    # One class for each pair, so that modules of a kind stay of one kind (torch.compile guards on it).
    identity = {
        "_halfstep_stock": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    return type(stock.__name__, (stock,), {**identity, **members(stock)})


@cache
def _calling(forward: Forward, on_copy: OnCopy | None) -> Members:
    def members(stock: type[nn.Module]) -> dict[str, Any]:
        stock_forward = stock.forward

        @wraps(stock_forward)
        def adopted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(stock_forward, self, *args, **kwargs)

        if on_copy is None:
            return {"forward": adopted}

        def __setstate__(self: nn.Module, state: dict[str, Any]) -> None:
            stock.__setstate__(self, state)  # type: ignore[no-untyped-call]
            on_copy(self)

        return {"forward": adopted, "__setstate__": __setstate__}

    return members
