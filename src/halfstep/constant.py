"""Functions whose results are kept, and which torch.compile calls while it traces."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar


P = ParamSpec("P")
T = TypeVar("T")


def constant(function: Callable[P, T]) -> Callable[P, T]:
    """The function with its results kept, which a traced graph takes for constants, as its arguments have to be.

    `functools.cache` alone will not do: Dynamo ignores it, warns, and traces what is beneath it, marked or not.
    """
    kept: Callable[..., Any] = cache(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return kept(*args, **kwargs)  # type: ignore[no-any-return]

    # All that torch.compiler.assume_constant_result does; it imports the whole compiler first, which takes seconds.
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call
