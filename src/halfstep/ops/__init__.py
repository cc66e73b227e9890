"""Differentiable operations on quantised operands."""

from halfstep.ops.linear import linear
from halfstep.ops.quantize import quantize


__all__ = ["linear", "quantize"]
