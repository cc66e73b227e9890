"""Functions of tensors that torch.compile leaves whole: traced, a call is one node of the graph."""

from collections.abc import Callable
from typing import Any

import torch


_LIBRARY = torch.library.Library("halfstep", "FRAGMENT")


class Operator:
    """`eager`, and under torch.compile the operator `halfstep::NAME`, which runs `inside` when the graph runs.

    Args:
        schema: torch's, such as `round(Tensor x, Tensor(a!) out, str key) -> ()`. Formats and rules travel as text.
        eager: what is called where nothing is traced.
        inside: what the operator runs; `eager` where it takes the same arguments.
        terms: makes the operator's arguments of `eager`'s.
        like: of an operator with a result, makes a tensor of the result's shape and dtype without values.
    """

    def __init__(
        self,
        schema: str,
        eager: Callable[..., Any],
        inside: Callable[..., Any] | None = None,
        terms: Callable[..., tuple[Any, ...]] | None = None,
        like: Callable[..., Any] | None = None,
    ) -> None:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, inside or eager, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, like or _nothing, "Meta")
        self._eager, self._terms = eager, terms
        self._node = getattr(torch.ops.halfstep, name)

    def __call__(self, *arguments: Any) -> Any:
        return self.traced(*arguments) if torch.compiler.is_compiling() else self._eager(*arguments)

    def traced(self, *arguments: Any) -> Any:
        """The operator, whether torch says that it traces or not."""
        return self._node(*(arguments if self._terms is None else self._terms(*arguments)))


def _nothing(*arguments: Any) -> None:
    """An operator that writes to what it was given has no result."""
