"""How a module's forward keeps what autograd saves of it in few bits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.ops.part import part_of
from halfstep.recipe import Storage


def traced_storage(module: nn.Module) -> Storage | None:
    """How what the module saves of its input is kept in a traced graph; None where it is kept as it is, where nothing
    is kept, and outside of a graph."""
    keeping: ops.Keeping | None = part_of(module).keeping
    if keeping is None or not torch.is_grad_enabled() or not torch.compiler.is_compiling():
        return None
    return keeping.saved.nonlinear


def around(module: nn.Module, x: Any) -> AbstractContextManager[Any]:
    """Within it, what autograd saves of the shape of x is kept as the recipe says of what is not linear.
    Not in a graph that is traced, in which no
       hooks run."""
    keeping: ops.Keeping | None = part_of(module).keeping
    if keeping is None or keeping.saved.nonlinear is None or not isinstance(x, Tensor) or torch.compiler.is_compiling():
        return nullcontext()
    return keeping.around(x)
