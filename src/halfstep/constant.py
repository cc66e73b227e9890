"""`constant`: cached functions whose results torch.compile treats as constants."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar


P = ParamSpec("P")
T = TypeVar("T")


def constant(function: Callable[P, T]) -> Callable[P, T]:
    """The function, cached, and called by torch.compile while tracing: results are constants in the graph, and so must
    the arguments be.

    `functools.cache` alone is not enough: Dynamo ignores it, warns, and traces the function beneath, marked or not.
    """
    kept: Callable[..., Any] = cache(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return kept(*args, **kwargs)  # type: ignore[no-any-return]

    # All that torch.compiler.assume_constant_result does; it imports the whole compiler first, which takes seconds.
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call
