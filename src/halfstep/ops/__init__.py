"""Differentiable operations on quantised operands."""

from halfstep.ops.attention import attention
from halfstep.ops.linear import linear
from halfstep.ops.matmul import matmul
from halfstep.ops.quantize import quantize


__all__ = ["attention", "linear", "matmul", "quantize"]
