"""Unit scaling: operations whose outputs and gradients are of unit size at initialisation, whatever their shapes."""

from halfstep.ops.scale import scale_backward, scale_forward
from halfstep.unit.activations import gated_silu, gelu, relu, sigmoid, silu, softmax, tanh
from halfstep.unit.attention import scaled_dot_product_attention
from halfstep.unit.calibration import Calibration, calibrate
from halfstep.unit.constraint import geometric_mean, get_constraint, none, to_grad_input, to_output
from halfstep.unit.layers import add, dropout, embedding, layer_norm, residual_add, residual_split, rms_norm
from halfstep.unit.losses import cross_entropy, mse_loss
from halfstep.unit.products import conv1d, conv2d, linear, linear_readout, matmul


__all__ = [
    "Calibration", "add", "calibrate", "conv1d", "conv2d", "cross_entropy", "dropout", "embedding", "gated_silu",
    "gelu", "geometric_mean", "get_constraint", "layer_norm", "linear", "linear_readout", "matmul", "mse_loss", "none",
    "relu", "residual_add", "residual_split", "rms_norm", "scale_backward", "scale_forward",
    "scaled_dot_product_attention", "sigmoid", "silu", "softmax", "tanh", "to_grad_input", "to_output",
]  # fmt: skip
