"""A tensor times one factor, rounded; and the largest magnitude that such factors come from."""

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import amax, operators
from halfstep.ops.casts import seed_of


def round_scaled(
    x: Tensor,
    factor: Tensor,
    format: Format,
    rounding: str,
    dtype: torch.dtype,
    generator: torch.Generator | int | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """x * factor, formed in float32 (float64 for float64), rounded onto `format` and saturated, in `dtype`.

    factor is a float32 scalar; one that is NaN makes everything NaN.

    Args:
        amax: a float32 scalar that is raised to max |x|, in the same pass; NaN where there is one.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    seed = seed_of(rounding, generator)
    if torch.compiler.is_compiling():
        torch.ops.halfstep.round_scaled(x, factor, out, format.key, rounding, seed)
        if amax is not None:
            amax.copy_(torch.maximum(amax, amax_of(x)))
    else:
        operators.round_scaled_into(x.detach().contiguous(), factor, out, format, rounding, seed, amax)
    return out


def amax_of(x: Tensor) -> Tensor:
    """max |x|, a float32 scalar: 0 for an empty tensor, NaN where there is one."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    if not torch.compiler.is_compiling() and amax.supports(x):
        return amax.run(x)
    low, high = torch.aminmax(x.detach())  # one pass, at the speed of memory; abs().amax() would be two
    return torch.maximum(-low, high).float()
