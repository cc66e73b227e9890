"""The amax of a CUDA tensor in one pass, without widening it; NaN where an element is NaN."""

from functools import cache

import torch

from halfstep.kernels.gpu import BLOCK, KINDS, Launch, functions


_BLOCK = 4 * BLOCK  # few programs, since each does an atomic max on one address


def run(x: torch.Tensor, unless: torch.Tensor | None = None, found: torch.Tensor | None = None) -> torch.Tensor:
    """max |x| of an `is_dense` tensor, as a float32 scalar: 0 for an empty tensor, NaN where an element is NaN.
    Where `unless`, a float32 scalar, is not 0, x is not read and the result is 0.

    Args:
        found: a tensor of zeros on x's device, at least 4 bytes; the result's bits are written to its start, and it is
            returned.
    """
    if found is None:
        found = torch.zeros((), dtype=torch.float32, device=x.device)
    n = x.numel()
    _launch(x.device, x.dtype, n >> 31)(-(-n // _BLOCK), x, found, unless, n)
    return found


@cache
def _launch(device: torch.device, dtype: torch.dtype, long: int) -> Launch:
    return Launch(functions("elementwise").largest, device, as_bits=True, SOURCE=KINDS[dtype], PART=BLOCK, B=_BLOCK)
