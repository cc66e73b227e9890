"""Functions whose result depends on nothing but their arguments: kept, and a constant in a traced model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar


P = ParamSpec("P")
T = TypeVar("T")


def constant(function: Callable[P, T]) -> Callable[P, T]:
    """The function with its results kept; torch.compile calls it while it traces, and takes what it says."""
    kept: Callable[..., Any] = cache(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return kept(*args, **kwargs)  # type: ignore[no-any-return]

    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call
