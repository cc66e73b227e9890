"""Hadamard transforms of blocks: a kernel where one supports the call, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep import quant
from halfstep.kernels.cpu import rotated
from halfstep.kernels.gpu import rotated as gpu_rotated


def rotate(x: Tensor, signs: Tensor, dim: int = -1) -> Tensor:
    """`quant.rotate`."""
    if torch.compiler.is_compiling():
        return quant.rotate(x, signs, dim)
    if rotated.supports(x := x.contiguous(), signs, dim):
        return rotated.run(x, signs, dim)
    if x.is_cuda and gpu_rotated.supports(x, signs, dim):
        return gpu_rotated.run(x, signs, dim)
    return quant.rotate(x, signs, dim)
