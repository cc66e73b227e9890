"""One product of two matrices, on the best path that this machine has for their dtype."""

import torch
from torch import Tensor

from halfstep.kernels import carried, operators
from halfstep.quant import Accumulator


def matmul(
    lhs: Tensor,
    rhs: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    accumulate: Accumulator | None = None,
    multiplier: float | None = None,
) -> Tensor:
    """lhs (rows, shared) times rhs (shared, columns), accumulated in float32, times `scale` and `multiplier`, plus
    bias, rounded once.

    Args:
        lhs, rhs: of the dtypes that hold them exactly; the product takes the wider.
        bias: (columns).
        scale: a float32 scalar, applied before the result is rounded.
        dtype: of the result; lhs's own when None.
        multiplier: a number beside the scale: known on the host, so that nothing waits for it.
        accumulate: how the terms are summed, where not in float32; the scale, the bias and the last rounding come
            after that.
    """
    dtype = dtype or lhs.dtype
    if accumulate is not None:
        product = accumulated(lhs.float(), rhs.float(), accumulate)
        product = product if scale is None else product * scale
        product = product if multiplier is None else product * multiplier
        return (product if bias is None else product + bias).to(dtype)
    wide = lhs.dtype
    if rhs.dtype != wide:
        wide = torch.promote_types(wide, rhs.dtype)
    if wide != dtype or (wide in carried.CARRIED and lhs.is_cpu):
        return carried.run(lhs, rhs, bias, scale, dtype, multiplier)
    if lhs.dtype != rhs.dtype:
        lhs, rhs = lhs.to(wide), rhs.to(wide)
    if scale is not None or multiplier is not None:
        return carried.run_native(lhs, rhs, bias, scale, multiplier)
    return torch.mm(lhs, rhs) if bias is None else torch.addmm(bias.to(dtype), lhs, rhs)


def accumulated(lhs: Tensor, rhs: Tensor, accumulate: Accumulator) -> Tensor:
    """lhs (..., rows, shared) times rhs (..., shared, columns), float32, summed as the accumulator says: in float32."""
    if lhs.dim() > 2:
        stack = [accumulated(a, b, accumulate) for a, b in zip(lhs.flatten(0, -3), rhs.flatten(0, -3), strict=True)]
        return torch.stack(stack).view(*lhs.shape[:-1], rhs.shape[-1]) if stack else lhs @ rhs
    lhs, rhs = lhs.contiguous(), rhs.contiguous()
    out = lhs.new_zeros(lhs.shape[0], rhs.shape[1])
    operators.ACCUMULATE(lhs, rhs, out, accumulate)
    return out
