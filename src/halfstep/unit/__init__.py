"""Unit scaling: operations whose outputs and gradients are of unit size at initialisation, whatever their shapes."""

from halfstep.ops.scale import scale_backward, scale_forward
from halfstep.unit.constraint import geometric_mean, get_constraint, none, to_grad_input, to_output
from halfstep.unit.products import linear, linear_readout


__all__ = [
    "geometric_mean", "get_constraint", "linear", "linear_readout", "none", "scale_backward", "scale_forward",
    "to_grad_input", "to_output",
]  # fmt: skip
