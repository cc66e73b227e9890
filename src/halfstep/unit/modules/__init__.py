"""Modules to write unit-scaled models from: torch's layers by name, arguments and state-dict keys, of unit scale."""

from halfstep.unit.modules.activations import GELU, Dropout, ReLU, Sigmoid, SiLU, Softmax, Tanh
from halfstep.unit.modules.attention import Attention, square_root_attention
from halfstep.unit.modules.linear import (
    SAME,
    Conv1d,
    Conv2d,
    Embedding,
    Linear,
    LinearReadout,
)
from halfstep.unit.modules.norms import LayerNorm, RMSNorm
from halfstep.unit.modules.transformer import MLP, GatedMLP, Stack, TransformerLayer, TransformerStack


__all__ = [
    "GELU", "MLP", "SAME", "Attention", "Conv1d", "Conv2d", "Dropout", "Embedding", "GatedMLP",
    "LayerNorm", "Linear", "LinearReadout", "RMSNorm", "ReLU", "SiLU", "Sigmoid", "Softmax", "Stack", "Tanh",
    "TransformerLayer", "TransformerStack", "square_root_attention",
]  # fmt: skip
