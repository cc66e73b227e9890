"""One product of two matrices, on the best path that this machine has for their dtype."""

import torch
from torch import Tensor

from halfstep.kernels import carried


def matmul(
    lhs: Tensor,
    rhs: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """lhs (rows, shared) times rhs (shared, columns), accumulated in float32, times `scale`, plus bias, rounded once.

    Args:
        lhs, rhs: of the dtypes that hold them exactly; the product takes the wider.
        bias: (columns).
        scale: a float32 scalar, applied before the result is rounded.
        dtype: of the result; lhs's own when None.
    """
    dtype = dtype or lhs.dtype
    wide = torch.promote_types(lhs.dtype, rhs.dtype)
    if wide != dtype or carried.supports(wide, lhs.device):
        return carried.run(lhs, rhs, bias, scale, dtype)
    if scale is not None:
        return carried.run_native(lhs, rhs, bias, scale)
    lhs, rhs = lhs.to(wide), rhs.to(wide)
    return torch.mm(lhs, rhs) if bias is None else torch.addmm(bias.to(dtype), lhs, rhs)
