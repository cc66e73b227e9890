"""Quantizing, decoding and rounding; differentiable matmuls, convolutions and attention with quantized operands."""

from torch import Tensor

from halfstep.kernels.cpu import masters as kernel
from halfstep.kernels.operator import amax_of
from halfstep.ops.attention import attention, rounded_attention
from halfstep.ops.casts import Quantized, decode, encode, fake_quantize, quantize, round_to
from halfstep.ops.code_tensor import CodeTensor
from halfstep.ops.codes import SavedCodes, decode_scaled, encode_scaled
from halfstep.ops.convolution import Window, convolution
from halfstep.ops.files import load_quantized, save_quantized
from halfstep.ops.linear import linear, rounded_weight
from halfstep.ops.linear_passes import RoundedWeight
from halfstep.ops.native import is_native_available
from halfstep.ops.plain import matmul, scale_backward, scale_forward
from halfstep.ops.smooth_swiglu import channel_scale, smooth_channels, smooth_tokens, token_scale
from halfstep.ops.snapshot import values_of
from halfstep.quant.masters import Kept, Master


__all__ = [
    "CodeTensor", "SavedCodes", "Quantized", "RoundedWeight", "Window", "amax_of", "attention", "channel_scale",
    "convolution", "decode", "decode_scaled", "encode", "encode_scaled", "fake_quantize", "follow",
    "is_native_available", "linear", "load_quantized", "matmul", "quantize", "round_to", "rounded_attention",
    "rounded_weight", "save_quantized", "scale_backward", "scale_forward",
    "smooth_channels", "smooth_tokens", "token_scale", "values_of",
]  # fmt: skip


def follow(master: Master, weight: Tensor, kept: Kept) -> None:
    """`master.follow(weight, kept)`, by a kernel if one supports the call, else by the reference."""
    if not kernel.run(weight, master.name, kept):
        master.follow(weight, kept)
