"""Functions of tensors that torch.compile leaves whole: traced, a call is one node of the graph.

And what modes that watch operators are told of tensors without values, such as torch's FakeTensors, where no kernel can
run.

Making the operands of a product writes in place, to scaling states too, so that is not seen, and done again in a
backward pass whatever the policy says; the product itself is seen, and kept where the policy says so.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch, checkpoint


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


_KEEPERS = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
_NOTHING = nullcontext()


def _keepers() -> Sequence[Any]:
    """The modes that may keep the operators that run now: none while a graph is traced."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return ()
    return [mode for mode in dispatch._get_current_dispatch_mode_stack() if isinstance(mode, _KEEPERS)]


def unseen() -> AbstractContextManager[Any]:
    """Within it no operator is kept."""
    keepers = _keepers()
    seen = keepers and keepers[-1] is dispatch._get_current_dispatch_mode()
    return dispatch._pop_mode_temporarily() if seen else _NOTHING


def times(x: Tensor, factor: Tensor | float) -> Tensor:
    """x, to which nothing else refers, times a factor: in its own memory, unless what gave it is kept."""
    return x * factor if _keepers() else x.mul_(factor)


def plus(x: Tensor, y: Tensor) -> Tensor:
    """The same of a sum."""
    return x + y if _keepers() else x.add_(y)
