"""The mean of several messages of codes in blocks with power-of-two scales.

They are decoded, added in order, divided and encoded piece by piece, so that data stays in the caches.
"""

import numba
import numpy as np
from torch import Tensor

from halfstep.kernels.cpu import blocks, dequantize
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.codes import pack, place, shifts, unpack
from halfstep.kernels.cpu.compiled import CHUNK, Kernel, ends, inner
from halfstep.kernels.cpu.lanes import as_floats
from halfstep.kernels.cpu.runs import add, elementwise, multiply
from halfstep.kernels.cpu.scales import power_scalars
from halfstep.quant.quantizer import Quantizer


def run(
    messages: Tensor, quantizer: Quantizer, size: int, scales: int, out: Tensor | None, total: Tensor | None
) -> bool:
    """Write the mean of messages, each a row of bytes, as a message to `out`, and in float32 to `total`. False where no
    kernel supports it: CPU tensors, whole blocks, and one-byte power-of-two scales, rounded to nearest.

    Args:
        size: the number of elements of a message, whose codes come first.
        scales: the offset of the scales, in bytes.
    """
    elements = blocks.code_constants(quantizer, size)
    if elements is None or not plain(messages, messages.dtype):
        return False
    if quantizer.scales is None or not quantizer.scales.rule.exact or quantizer.rounding != "nearest_even":
        return False
    format, count = quantizer.format, len(messages)
    inverse = np.float32(0 if count & count - 1 else 1 / count)  # for a power of two, where multiplying is exact
    read = dequantize.meaning(format), shifts(format), blocks.levels(quantizer.scales.tile)
    written = power_scalars(format, quantizer.scales.rule), *elements
    own = None if out is None else array(out), None if total is None else array(total)
    _mean(size * count, array(messages), size, scales, np.float32(count), inverse, *read, *written, *own)
    return True


@elementwise
def _divide(out, count):
    return out / count


@inner
def _into_message(values, out, a, b, scales, levels, rule, numbers, codes, shifts):
    first, part = scales + (a >> len(levels)), place(out, a, b, shifts)
    stored = out[first : first + (b - a >> len(levels))]
    blocks.round_piece(
        values, 0, levels, rule, None, None, None, None, None, stored, part, numbers, codes, None, None, None
    )
    pack(part, out, a, b, shifts)


@Kernel
def _mean(messages, size, scales, count, inverse, meaning, shifts, levels, rule, numbers, codes, out, total):
    stride = messages.size // int(count)
    for chunk in numba.prange((size + CHUNK - 1) // CHUNK):
        a, b = ends(chunk, size)
        summed, part = np.empty(b - a, np.uint32) if total is None else total[a:b], np.empty(b - a, np.uint32)
        first, last = scales + (a >> len(levels)), scales + (b >> len(levels))
        for start in range(0, messages.size, stride):
            message = messages[start : start + stride]
            into, stored = part if start else summed, dequantize.scales_from(message[first:last])
            dequantize.values_piece(unpack(message, a, b, shifts), stored, levels, into, meaning)
            if start:
                add(as_floats(summed), as_floats(part))
        if inverse > 0:
            multiply(as_floats(summed), inverse)
        else:
            _divide(as_floats(summed), count)
        if out is not None:
            _into_message(summed, out, a, b, scales, levels, rule, numbers, codes, shifts)
