"""A quick look: the last mantissa bit that any value of a tensor uses, at the speed of reading memory."""

from __future__ import annotations

from halfstep.bits.origin import Origin
from halfstep.bits.scan import CHUNK, Progress
from halfstep.bits.values import Values
from halfstep.kernels.cpu import bits as kernel


_FRACTIONS = {"float32": 23, "bfloat16": 7, "float16": 10}


def quick_origin(tensor: Values, progress: Progress | None = None) -> Origin | None:
    """What the OR of all values' bits says; None for other types than float32, bfloat16 and float16.

    One value with a last bit set shows that the type is used in full, and the rest is not read. That none has it is not
    weighed: it counts nothing, so a tensor of a few values looks like one of millions.
    """
    if tensor.dtype not in _FRACTIONS:
        return None
    ored, fraction, left = 0, _FRACTIONS[tensor.dtype], tensor.nbytes
    for chunk in tensor.chunks(CHUNK):
        ored |= kernel.any_bits(chunk, 1 << fraction)
        done = left if ored & 1 else chunk.nbytes
        left -= done
        if progress is not None:
            progress(done)
        if not left:
            break
    used = ored & (1 << fraction) - 1
    bits = fraction + 1 - ((used & -used).bit_length() - 1) if used else 1
    through = _through(bits, fraction + 1)
    return Origin(tensor.dtype, through, full=bits == fraction + 1, telling=tensor.numel if used else 0, counted=False)


def _through(bits: int, most: int) -> tuple[str, ...]:
    if bits == most or bits == 1:
        return ()
    return ("bf16",) if bits <= 8 < most else ("fp16",) if bits <= 11 < most else ()
