"""Unit scaling: operations whose outputs and gradients have unit variance at initialization, whatever their shapes."""

from halfstep.ops.plain import scale_backward, scale_forward
from halfstep.unit.activations import gated_silu, gelu, relu, sigmoid, silu, softmax, tanh
from halfstep.unit.calibration import (
    Calibration,
    calibrate,
    geometric_mean,
    get_constraint,
    none,
    to_grad_input,
    to_output,
)
from halfstep.unit.functions import (
    add,
    conv1d,
    conv2d,
    cross_entropy,
    dropout,
    embedding,
    layer_norm,
    linear,
    linear_readout,
    matmul,
    mse_loss,
    residual_add,
    residual_split,
    rms_norm,
    scaled_dot_product_attention,
)
from halfstep.unit.groups import parameter_groups
from halfstep.unit.modules.activations import GELU, Dropout, LayerNorm, ReLU, RMSNorm, Sigmoid, SiLU, Softmax, Tanh
from halfstep.unit.modules.linear import (
    SAME,
    Conv1d,
    Conv2d,
    Embedding,
    Linear,
    LinearReadout,
)
from halfstep.unit.modules.transformer import (
    MLP,
    Attention,
    GatedMLP,
    Stack,
    TransformerLayer,
    TransformerStack,
    equal_shares,
    fixed,
    running_mean,
    square_root_attention,
)
from halfstep.unit.parametrization import DECAYS, Parametrization, get_parametrization, list_parametrizations
from halfstep.unit.roles import (
    KINDS,
    Role,
    Tag,
    decouple_decay,
    multipliers_of,
    roles,
    set_depth,
    set_roles,
    set_tag,
    tag_of,
)


__all__ = [
    "DECAYS", "GELU", "KINDS", "MLP", "SAME", "Attention", "Calibration", "Conv1d", "Conv2d", "Dropout",
    "Embedding", "GatedMLP", "LayerNorm", "Linear", "LinearReadout", "Parametrization", "RMSNorm", "ReLU", "Role",
    "SiLU", "Sigmoid", "Softmax", "Stack", "Tag", "Tanh", "TransformerLayer", "TransformerStack", "add", "calibrate",
    "conv1d", "conv2d", "cross_entropy", "decouple_decay", "dropout", "embedding", "equal_shares", "fixed",
    "gated_silu", "gelu", "geometric_mean", "get_constraint", "get_parametrization", "layer_norm", "linear",
    "linear_readout", "list_parametrizations", "matmul", "mse_loss", "multipliers_of", "none", "parameter_groups",
    "relu", "residual_add", "residual_split", "rms_norm", "roles", "running_mean", "scale_backward", "scale_forward",
    "scaled_dot_product_attention", "set_depth", "set_roles", "set_tag", "sigmoid", "silu", "softmax",
    "square_root_attention", "tag_of", "tanh", "to_grad_input", "to_output",
]  # fmt: skip
