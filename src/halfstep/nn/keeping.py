"""How a module's forward keeps what autograd saves of it in few bits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops


KEEPING = "_halfstep_keeping"
"""Where a module has the `ops.Keeping` of its model, if the recipe keeps anything of the module's in few bits."""


def around(module: nn.Module, x: Any) -> AbstractContextManager[Any]:
    """Within it, what autograd saves of the shape of x is kept as the recipe says of what is not linear."""
    keeping: ops.Keeping | None = vars(module).get(KEEPING)
    if keeping is None or keeping.saved.nonlinear is None or not isinstance(x, Tensor) or torch.compiler.is_compiling():
        return nullcontext()
    return keeping.around(x)
