"""Functions of tensors that torch.compile leaves whole: traced, a call is one node of the graph.

And what modes that watch operators are told of tensors without values, such as torch's FakeTensors, where no kernel can
run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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


_LIBRARY.define("follow(Tensor x, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.impl("follow", lambda x, out: out, "CompositeExplicitAutograd")
FOLLOW = torch.ops.halfstep.follow.default
"""The operator by which `blank` says what follows from what."""


def blank(x: Tensor, *outs: Tensor) -> bool:
    """Whether x has no values: then there is nothing to compute, and modes that watch operators see that `outs`
    follow from x."""
    if not hasattr(x, "fake_mode"):
        return False
    for out in outs:
        FOLLOW(x, out)
    return True
