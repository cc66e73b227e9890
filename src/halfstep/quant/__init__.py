"""Rounding tensors onto formats, in torch, bit-defined: the reference for every kernel."""

from halfstep.quant.accumulator import Accumulator, get_accumulator
from halfstep.quant.cast import decode, encode, round_at, round_to
from halfstep.quant.estimator import Clamp, Estimator
from halfstep.quant.hadamard import Hadamard, rotate
from halfstep.quant.quantizer import Quantized, Quantizer, Scales, get_quantizer, layout
from halfstep.quant.rounding import CUDAGraph, derive_seed, draw_seed, noise_bits
from halfstep.quant.scaling import Scaling, get_scaling
from halfstep.quant.tile import ROW, TENSOR, Tile


__all__ = [
    "ROW", "TENSOR", "Accumulator", "CUDAGraph", "Clamp", "Estimator", "Hadamard", "Quantized", "Quantizer", "Scales",
    "Scaling", "Tile", "decode", "derive_seed", "draw_seed", "encode", "get_accumulator", "get_quantizer",
    "get_scaling", "layout", "noise_bits", "rotate", "round_at", "round_to",
]  # fmt: skip
