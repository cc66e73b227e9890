"""The largest magnitude of a CUDA tensor: read once, nothing widened, NaN kept."""

from functools import cache

import torch

from halfstep.kernels.gpu import BLOCK, KINDS, Launch, functions


_BLOCK = 4 * BLOCK  # few programs, since all raise one number


def run(x: torch.Tensor, unless: torch.Tensor | None = None, found: torch.Tensor | None = None) -> torch.Tensor:
    """max |x| of a tensor that `lies_plain`, as a float32 scalar: 0 of an empty tensor, NaN where there is one.
    0 too, and x is not read, where `unless`, another, is not 0.

    Args:
        found: zeros there, 4 bytes or more, the first of which become its bits: given back as they are.
    """
    if found is None:
        found = torch.zeros((), dtype=torch.float32, device=x.device)
    n = x.numel()
    _launch(x.device, x.dtype, n >> 31)(-(-n // _BLOCK), x, found, unless, n)
    return found


@cache
def _launch(device: torch.device, dtype: torch.dtype, long: int) -> Launch:
    return Launch(functions("elementwise").largest, device, as_bits=True, SOURCE=KINDS[dtype], PART=BLOCK, B=_BLOCK)
