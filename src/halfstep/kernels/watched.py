"""Selective activation checkpointing keeps what operators gave and gives it again: what it sees must not be written to.

Making the operands of a product writes in place, to scaling states too, so that is not seen, and done again in a
backward pass whatever the policy says; the product itself is seen, and kept where the policy says so.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch, checkpoint


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
