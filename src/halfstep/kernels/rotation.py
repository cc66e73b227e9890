"""Hadamard transforms of blocks: a kernel where one supports the call, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep import quant
from halfstep.kernels.cpu import rotated


def rotate(x: Tensor, signs: Tensor, dim: int = -1) -> Tensor:
    """`quant.rotate`."""
    if not torch.compiler.is_compiling() and rotated.supports(x := x.contiguous(), signs, dim):
        return rotated.run(x, signs, dim)
    return quant.rotate(x, signs, dim)
