"""How a module's forward keeps what autograd saves of it in few bits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.ops.part import part_of
from halfstep.recipe import Storage


def kept(module: nn.Module, x: Any) -> tuple[Storage | None, AbstractContextManager[Any]]:
    """How what the module saves of its input x is kept in few bits, where the recipe says so of what is not linear: in
    a traced graph, in which no hooks run, by rounding x as a storage; else within a context, by hooks of autograd."""
    keeping: ops.Keeping | None = part_of(module).keeping
    if keeping is None or keeping.saved.nonlinear is None or not isinstance(x, Tensor):
        return None, nullcontext()
    if not torch.compiler.is_compiling():
        return None, keeping.around(x)
    return keeping.saved.nonlinear if torch.is_grad_enabled() else None, nullcontext()
