"""A matmul's float32 result times a scale, plus a bias, rounded to a dtype of 16 bits."""

import triton
import triton.language as tl

from halfstep.kernels.gpu.jit.masters import nearest
from halfstep.kernels.gpu.jit.numbers import as_float, read, widened


@triton.jit(do_not_specialize=["n", "columns"])
def finish(product, scale, bias, out, n, columns, TARGET: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr):
    """Finish a block of the flat result; `columns` is the length of the bias."""
    start = tl.program_id(0).to(tl.int64) * B
    if start + B <= n:
        block(product + start, scale, bias, out + start, start, None, columns, TARGET, HALF, B)
    else:
        inside = start + tl.arange(0, B) < n
        block(product + start, scale, bias, out + start, start, inside, columns, TARGET, HALF, B)


@triton.jit
def block(
    product, scale, bias, out, start, inside, columns, TARGET: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """A block that starts at these addresses, at element `start`."""
    index = tl.arange(0, B)
    number = as_float(read(product + index, inside).to(tl.uint32, bitcast=True)) * tl.load(scale)
    if bias is not None:
        column = (start % columns).to(tl.int32) + index
        if columns >= B:
            column = tl.where(column >= columns, column - columns, column)
        else:
            column = column % columns
        number = number + as_float(widened(tl.load(bias + column), TARGET))
    tl.store(out + index, nearest(number, TARGET, HALF), mask=inside)
