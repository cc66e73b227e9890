"""Hadamard transforms of blocks: a kernel where one supports the call, else the reference; and as operators."""

import torch
from torch import Tensor

from halfstep import quant
from halfstep.kernels.cpu import rotated
from halfstep.kernels.gpu import rotated as gpu_rotated
from halfstep.kernels.gpu.launch import here
from halfstep.kernels.operator import Operator


def rotate(x: Tensor, signs: Tensor, dim: int = -1) -> Tensor:
    """`quant.rotate`."""
    return _ROTATE(x, signs, dim)  # type: ignore[no-any-return]


def _rotate(x: Tensor, signs: Tensor, dim: int) -> Tensor:
    x = x.contiguous()
    made = gpu_rotated.run(x, signs, dim) if here(x) else rotated.run(x, signs, dim)
    return quant.rotate(x, signs, dim) if made is None else made


def _rotated_like(x: Tensor, signs: Tensor, dim: int) -> Tensor:
    """A tensor of the result's shape and dtype: a graph's sizes are unknowns, and Dynamo may not compute with them."""
    shape = list(x.shape)
    shape[dim] = -(-shape[dim] // len(signs)) * len(signs)
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _draw_signs(lhs: Tensor, rhs: Tensor, out: Tensor) -> None:
    """Signs of a Hadamard transform for a product of these two: so a graph draws them in the product's pass, and not
    once for two products."""
    out.copy_(quant.Hadamard(len(out), "random").signs(out.device))


_ROTATE = Operator("rotate(Tensor x, Tensor signs, int dim) -> Tensor", _rotate, like=_rotated_like)
draw_signs = Operator("draw_signs(Tensor lhs, Tensor rhs, Tensor(a!) out) -> ()", _draw_signs)
