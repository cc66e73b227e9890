"""One product of two matrices, on the best path that this machine has for their dtype."""

import torch
from torch import Tensor

from halfstep.kernels import carried


def matmul(lhs: Tensor, rhs: Tensor, bias: Tensor | None = None) -> Tensor:
    """lhs (rows, shared) times rhs (shared, columns), plus bias (columns), accumulated in float32, in lhs's dtype."""
    if carried.supports(lhs.dtype, lhs.device):
        return carried.run(lhs, rhs, bias)
    return torch.mm(lhs, rhs) if bias is None else torch.addmm(bias, lhs, rhs)
