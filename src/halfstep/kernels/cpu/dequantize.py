"""Dequantizes packed codes with the scales of their blocks: `quant.Quantized.dequantize`, bit for bit."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import prange, types
from torch import Tensor

from halfstep.formats import Float, Format, Integer, ocp
from halfstep.kernels.cpu import blocks, element_codes
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.codes import shifts, unpack
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, ends, inner, specialized
from halfstep.kernels.cpu.divided import scaled
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, NAN, as_floats, lanes, nearest_as
from halfstep.kernels.cpu.runs import elementwise, reduction
from halfstep.kernels.cpu.scales import larger_of, powers
from halfstep.quant.quantizer import Quantizer


def run(tensors: dict[str, Tensor], out: Tensor, quantizer: Quantizer) -> bool:
    """Write the values of `tensors` (`codes`, `scale` ...), which have the quantizer's layout, to `out`. False where no
    kernel supports it: all must be contiguous CPU tensors, `out` fp32 or bf16 with rows of whole blocks."""
    format, scales = quantizer.format, quantizer.scales
    if scales is None or not plain(out, torch.float32, torch.bfloat16) or not out.dim():
        return False
    if blocks.code_constants(quantizer, out.shape[-1]) is None:
        return False
    for tensor in tensors.values():
        if not plain(tensor, tensor.dtype):
            return False
    whole = tensors["scale"].view(-1)
    scale = (whole.float() if scales.rule.narrow else whole).numpy()
    if scales.rule.two_level:
        table = element_codes.table(ocp.float8_e4m3fn, torch.float32).numpy()
        scale = table[scale] * np.float32(tensors["tensor_scale"])
    levels = blocks.levels(scales.tile)
    _values(out.numel(), array(tensors["codes"]), scale, levels, array(out), meaning(format), shifts(format))
    return True


@cache
def meaning(format: Format) -> Any:
    """How codes are decoded: the constants of `element_codes.decoding_scalars`, or a codebook's values."""
    if isinstance(format, Float | Integer):
        return element_codes.decoding_scalars(format)
    return element_codes.table(format, torch.float32).numpy()


@lanes("like")
def _restored(code, scale, meaning, like):
    return nearest_as(scaled(element_codes.decoded(code.to(32), meaning).float(), scale, like), like)


@lanes("like")
def _scaled(value, scale, like):
    return nearest_as(scaled(value, scale, like), like)


@inner
def _numbers_piece(codes, scale, levels, out, meaning):
    block = 1 << len(levels)  # a compile-time constant: a loop of fixed length vectorises
    for b in range(scale.size):
        s = scale[b]
        start = b * block
        for i in range(block):
            j = start + i
            out[j] = _restored(codes[j], s, meaning, out[j])


@lanes("like")
def _restored_half(code, scale, meaning, like):
    return nearest_as(element_codes.half_of(code, element_codes.Decoding(*meaning)) * scale, like)


@lanes(types.uint8)
def larger_code(most, code, meaning):
    shift = element_codes.Decoding(*meaning).sign_shift
    return most.max(code & (shift.constant(MAGNITUDE) >> shift).to(8))


@lanes(types.float32)
def half_scale(scale, most, meaning):
    """The factor on the `half_of` of a block's codes, 0 for zeros; NaN where it is inexact, or a code is not finite."""
    d, bits = element_codes.Decoding(*meaning), scale.bits()
    times = bits + d.offset - (112 << 23)
    usual = ((bits - (1 << 23)) < 226 << 23) & ((times - (1 << 23)) < 226 << 23)  # normal floats up to 2^100
    known = (usual | bits.equals(0)) & (most.to(32) <= d.half.min(d.largest)) & (d.half > 0)
    return known.pick(bits.equals(0).pick(bits, times), NAN).float()


_largest_code, _to_half_scales = reduction(larger_code), elementwise(half_scale)


@inner
def _half_scales(codes, scale, meaning, times):
    """The `half_scale` of many blocks, written to `times`; returns whether none is NaN."""
    _to_half_scales(times, scale, _largest_code(np.uint8(0), codes, meaning), meaning)
    return larger_of(np.uint32(0), times) < INFINITY


@inner
def _halves_piece(codes, times, levels, out, meaning):
    block = 1 << len(levels)  # a compile-time constant: a loop of fixed length vectorises
    for b in range(times.size):
        half = times[b]
        start = b * block
        if half > 0:
            for i in range(block):
                j = start + i
                out[j] = _restored_half(codes[j], half, meaning, out[j])
        else:  # a scale of 0 gives zeros, whatever the codes are
            out[start : start + block] = 0


@inner
def _floats_piece(codes, scale, levels, out, meaning):
    times = np.empty(scale.size, np.float32)
    if _half_scales(codes, scale, meaning, times):
        _halves_piece(codes, times, levels, out, meaning)
    else:
        _numbers_piece(codes, scale, levels, out, meaning)


@inner
def _table_piece(codes, scale, levels, out, table):
    block, mask = 1 << len(levels), np.uint8(table.size - 1)
    for b in range(scale.size):
        s = scale[b]
        start = b * block
        for i in range(block):
            j = start + i
            out[j] = _scaled(table[codes[j] & mask], s, out[j])


@specialized
def scales_from(stored):
    """In kernels: stored scales as float32: they are float32 already, or bytes of powers of two."""
    if stored.dtype == types.float32:
        return lambda stored: stored

    def of_bytes(stored):
        scale = np.empty(stored.size, np.uint32)
        powers(scale, stored)
        return as_floats(scale)

    return of_bytes


@specialized
def values_piece(codes, scale, levels, out, meaning):
    """In kernels: write the values of a chunk's blocks, from one-byte codes and float32 scales."""
    if isinstance(meaning, types.Array):
        return lambda codes, scale, levels, out, meaning: _table_piece(codes, scale, levels, out, meaning)
    if len(meaning) > 2:
        return lambda codes, scale, levels, out, meaning: _floats_piece(codes, scale, levels, out, meaning)
    return lambda codes, scale, levels, out, meaning: _numbers_piece(codes, scale, levels, out, meaning)


@Kernel
def _values(codes, scale, levels, out, meaning, shifts):
    for chunk in prange((out.size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, out.size)
        part = scale[a >> len(levels) : b >> len(levels)]
        values_piece(unpack(codes, a, b, shifts), scales_from(part), levels, out[a:b], meaning)
