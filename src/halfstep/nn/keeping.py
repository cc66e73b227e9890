"""How a module's forward keeps what autograd saves of it in few bits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.ops.part import part_of
from halfstep.recipe import Storage


def storage_of(module: nn.Module) -> Storage | None:
    """How what the module saves of its input is kept; None where it is kept as it is, and where nothing is kept."""
    keeping: ops.Keeping | None = part_of(module).keeping
    return None if keeping is None or not torch.is_grad_enabled() else keeping.saved.nonlinear


def around(module: nn.Module, x: Any) -> AbstractContextManager[Any]:
    """Within it, what autograd saves of the shape of x is kept as the recipe says of what is not linear.

    Not for a graph that is traced, in which no hooks run."""
    keeping: ops.Keeping | None = part_of(module).keeping
    if keeping is None or keeping.saved.nonlinear is None or not isinstance(x, Tensor):
        return nullcontext()
    return keeping.around(x)
