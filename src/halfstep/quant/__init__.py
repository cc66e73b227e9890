"""Rounding tensors onto formats, in torch, bit-defined: the reference for every kernel."""

from halfstep.quant.cast import round_to
from halfstep.quant.quantizer import Quantizer
from halfstep.quant.rounding import derive_seed, draw_seed, noise_bits


__all__ = ["Quantizer", "derive_seed", "draw_seed", "noise_bits", "round_to"]
