"""Give a module another forward without making it another module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn


Forward = Callable[..., Any]
"""forward(stock_forward, module, *args, **kwargs) -> what the module returns"""


def adopt(module: nn.Module, forward: Forward) -> None:
    """Make `module` call `forward`, by giving it a subclass of its own class.

    Parameters, names, ties, hooks, state-dict keys and `isinstance` keep their identity; the class keeps its name,
    which Hugging Face writes into config.json, and `forward` its signature. `release` undoes it exactly.
    """
    module.__class__ = _subclass(type(module), forward)  # type: ignore[arg-type]


def release(module: nn.Module) -> None:
    """Give `module` back the class it had before every `adopt`."""
    while (stock := vars(type(module)).get("_halfstep_stock")) is not None:
        module.__class__ = stock


@cache
def _subclass(stock: type[nn.Module], forward: Forward) -> type[nn.Module]:
    # One class for each pair, so that modules of a kind stay of one kind (torch.compile guards on it).
    stock_forward = stock.forward

    @wraps(stock_forward)
    def adopted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(stock_forward, self, *args, **kwargs)

    members = {
        "forward": adopted,
        "_halfstep_stock": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    return type(stock.__name__, (stock,), members)
