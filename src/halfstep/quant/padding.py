"""Tensors made larger by a constant, those without elements too."""

import torch
from torch import Tensor


def pad(x: Tensor, widths: tuple[int, ...], fill: float = 0.0) -> Tensor:
    """`torch.nn.functional.pad` by a constant, with its widths (none negative): the last dimension first.

    torch 2.8 refuses it where a dimension of the result is empty. Such a result has no elements, nor had x.
    """
    if x.numel() == 0:
        ends = zip(widths[::2], widths[1::2], strict=True)
        grown = [size + sum(next(ends, (0, 0))) for size in reversed(x.shape)]
        if 0 in grown:
            return x.reshape(grown[::-1])
    return torch.nn.functional.pad(x, widths, value=fill)
