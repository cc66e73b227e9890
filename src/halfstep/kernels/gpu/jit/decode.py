"""The values of codes, by arithmetic or from a table, and the largest code noted on the way."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.numbers import as_bits, constant, decoded, narrowed
from halfstep.kernels.gpu.jit.packing import put_numbers, taken


@triton.jit
def stored_value(code, table, last, D: tl.constexpr, WHOLE: tl.constexpr, TARGET: tl.constexpr):
    """What is stored of a code, 32 bits wide: an integer format's where `WHOLE`."""
    if D is None:
        made = tl.load(table + tl.minimum(code.to(tl.int32, bitcast=True), last))
    elif WHOLE:
        number = (code << D[0]).to(tl.int32, bitcast=True) >> D[0]
        made = narrowed(as_bits(number.to(tl.float32) * constant(D[1])), TARGET)
    else:
        made = narrowed(decoded(code, D), TARGET)
    return made


@triton.jit(do_not_specialize=["n", "last"])
def decode(
    codes, out, table, found, n, last,
    D: tl.constexpr, WHOLE: tl.constexpr, TARGET: tl.constexpr, PACKED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write the values of codes; raise `found` to the largest code. The table has the values of codes up to `last`."""
    start = tl.program_id(0).to(tl.int64) * B
    if start + B <= n:
        code = taken(codes, start, n, PACKED, True, B)
        put_numbers(out + start, stored_value(code, table, last, D, WHOLE, TARGET), n - start, True, B)
    else:
        code = taken(codes, start, n, PACKED, False, B)
        put_numbers(out + start, stored_value(code, table, last, D, WHOLE, TARGET), n - start, False, B)
    if found is not None:
        tl.atomic_max(found, tl.max(code.to(tl.int32, bitcast=True)), sem="relaxed")
