"""Kernels on tensors of more than 2^31 elements, in Triton's interpreter: only the last programs of each launch run, so
that little of the allocated memory is touched. Prints a line of JSON for each kernel.

    TRITON_INTERPRET=1 PYTHONPATH=src:.triton/3.7.1 python tests/gpu/far.py [casts|tiles|rows ...]
"""

import json
import sys

import numpy as np
import torch
import triton
from triton.runtime import interpreter

from halfstep import formats, get_quantizer, quant
from halfstep.kernels.gpu import amax, blocks, cast, layouts, rotated
from halfstep.quant import Quantizer, Scales, rotate
from halfstep.quant.quantizer import layout
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW


TAIL, LAST = 4096, 8  # elements compared at the end of a flat tensor; programs that run
N = (1 << 31) + 3 * TAIL
ROWS, COLUMNS, LOWER = (1 << 18) + 256, 8192, 256
E4M3, BF16 = formats.get("float8_e4m3fn"), torch.bfloat16


def only_the_last(launch):
    """Wrap a launch so that only the last programs of a long grid run."""

    def run(executor, *given, **named):
        count = executor.grid[0]
        some = range(max(0, count - LAST), count)
        interpreter.range = lambda *bounds: some if bounds == (count,) else range(*bounds)
        try:
            return launch(executor, *given, **named)
        finally:
            del interpreter.range

    return run


def flat():
    """A long tensor, and the values at its end."""
    x, tail = torch.empty(N, dtype=BF16), torch.randn(TAIL, generator=torch.Generator().manual_seed(0)).to(BF16)
    x[-TAIL:] = tail
    return x, tail


def casts():
    x, tail = flat()
    codes = torch.empty(N, dtype=torch.uint8)
    cast.run_codes(x, codes, E4M3, "nearest_even", "saturate", None)
    yield "codes", codes[-TAIL:], quant.encode(tail, E4M3)
    out = torch.empty(N, dtype=BF16)
    cast.run(x, out, E4M3, "nearest_even", "saturate", None)
    yield "cast", out[-TAIL:], quant.round_to(tail, E4M3)
    cast.run_decode(codes, out, E4M3)
    yield "decode", out[-TAIL:], quant.decode(codes[-TAIL:], E4M3, BF16)
    factor = torch.tensor(3.0)
    cast.run(x, out, E4M3, "nearest_even", "saturate", None, factor)
    yield "scaled", out[-TAIL:], quant.round_to(tail.float() * factor, E4M3).to(BF16)
    cast.run_posit(x, out, formats.get("posit8_2"), "nearest_even")
    yield "posit", out[-TAIL:], quant.round_to(tail, formats.get("posit8_2"))
    x[-2 * LAST * (1 << 14) :], x[-3] = 0.0, 77.0
    yield "amax", amax.run(x), torch.tensor(77.0)


def matrix():
    x = torch.empty(ROWS, COLUMNS, dtype=BF16)
    x[-LOWER:] = torch.randn(LOWER, COLUMNS, generator=torch.Generator().manual_seed(1)).to(BF16)
    return x, x[-LOWER:]


def tiles():
    x, lower = matrix()
    for name in ("mxfp8_e4m3", "fp8_1x128", "fp8_128x128", "mxfp4"):
        quantizer = get_quantizer(name)
        expected, bits = quantizer.quantize(lower), quantizer.format.bits
        made = {key: torch.empty(size, dtype=kind) for key, (kind, size) in layout(quantizer, x.shape, BF16).items()}
        blocks.run(x, made, quantizer, None)
        few = 128 * bits // 8
        wanted = expected.codes.view(LOWER, -1)
        yield f"tiles {name}", made["codes"].view(ROWS, -1)[-1, -few:], wanted[-1, -few:]
        along, turned = layouts.empty(x, quantizer)
        layouts.run(x, quantizer, along, turned)
        yield f"both layouts {name}", along["codes"].view(ROWS, -1)[-128:, -few:], wanted[-128:, -few:]
        wanted = quantizer.quantize(lower.t().contiguous()).codes.view(COLUMNS, -1)[-128:, -few:]
        yield f"both layouts {name}, transposed", turned["codes"].view(COLUMNS, -1)[-128:, -few:], wanted
        made["codes"].view(ROWS, -1)[-LOWER:] = expected.codes.view(LOWER, -1)
        made["scale"][-len(expected.scale) :] = expected.scale
        out = torch.empty(ROWS, COLUMNS, dtype=BF16)
        blocks.run_dequantize(made, out, quantizer)
        yield f"dequantised {name}", out[-1, -128:], expected.dequantize(BF16)[-1, -128:]


def rows():
    x, lower = matrix()
    quantizer = Quantizer(E4M3, scales=Scales(ROW, get_scaling("rceil")))
    x[-1] = 3.0
    largest, _ = blocks.Largest(quantizer, tuple(x.shape), x.dtype, x.device)(x)
    yield "maxima of rows", largest[-1:].view(torch.float32), torch.tensor([3.0])
    signs = torch.where(torch.arange(16) % 3 == 0, -1.0, 1.0)
    out = rotated.run(x, signs, 1)
    yield "rotated", out[-1, -16:], rotate(lower, signs, 1)[-1, -16:]


if __name__ == "__main__":
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    interpreter.GridExecutor.__call__ = only_the_last(interpreter.GridExecutor.__call__)
    for test in [globals()[name] for name in sys.argv[1:]] or [casts, tiles, rows]:
        for kernel, found, expected in test():
            same = torch.equal(found.float(), expected.float())
            print(json.dumps({"kernel": kernel, "triton": triton.__version__, "equal": same}), flush=True)
