"""Tests of elementwise kernels, and of those that find the amax of a tensor."""

from itertools import product
from math import prod

import torch

from halfstep import formats, quant
from halfstep.kernels import operator
from halfstep.kernels.cpu import amax, cast, codes, posit
from halfstep.kernels.gpu import (
    amax as gpu_amax,
    cast as gpu_cast,
    history,
)
from halfstep.kernels.selftest.case import (
    BFLOAT16,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FP8,
    ROUNDINGS,
    SEED,
    Case,
    Cases,
    Run,
    cell,
    coded,
    finite,
    hard,
    kernel_tests,
    named,
    scalar,
    seed_of,
    written,
)
from halfstep.quant.cast import CONTAINERS, pack
from halfstep.quant.scaling.delayed import Delayed


def _cast(
    format: formats.Format, device: torch.device, dtype: torch.dtype, size: int, rounding: str, overflow: str,
    held: str, run: Run,
) -> Cases:  # fmt: skip
    x, seed = hard(size, dtype, format), seed_of(rounding)
    out, handed = torch.full_like(x, 7, device=device), cell(SEED, device) if held else seed
    expected = quant.round_to(x, format, rounding, overflow, seed)
    yield Case(expected, written(run, x, out, format, rounding, overflow, handed), "", x)


def _scaled(
    format: formats.Format, device: torch.device, dtype: torch.dtype, size: int, into: torch.dtype, make: Run,
    noted: str, run: Run,
) -> Cases:  # fmt: skip
    """Values of x times a factor, with or without recording amax, for which NaN's bits are the largest."""
    x, factor, largest = make(size, dtype, format), scalar(3.7), scalar(0.5, device) if noted else None
    how = format, "nearest_even", "saturate", None, factor.to(device), largest
    found = written(run, x, torch.full_like(x, 7, dtype=into, device=device), *how)
    yield Case(quant.round_to(x.float() * factor, format, dtype=into), found, "", x)
    yield Case(torch.cat([x.float().abs(), scalar(0.5)[None]]).max(), found is not False and largest, "the largest")


def _amax(dtype: torch.dtype, device: torch.device, size: int, make: Run, unless: float | None, run: Run) -> Cases:
    x, given = make(size, dtype), [] if unless is None else [scalar(unless, device)]
    yield Case(scalar(0.0) if unless or not size else x.float().abs().max(), run(x.to(device), *given))


def _codes(
    format: formats.Format, device: torch.device, dtype: torch.dtype, size: int, rounding: str, run: Run, **more: bool
) -> Cases:
    x, seed = hard(size, dtype, format), seed_of(rounding)
    x = x if format.has_nan else x[~x.isnan()]
    out = torch.empty_like(x, dtype=CONTAINERS[format.storage_bits], device=device)
    found = coded(run, x, out, format, rounding, "saturate", seed, **more)
    yield Case(quant.encode(x, format, rounding, "saturate", seed), found, "", x)


def _packed(
    format: formats.Format, device: torch.device, dtype: torch.dtype, size: int, run: Run, decode: Run
) -> Cases:
    """4- and 6-bit codes packed as by `quant.pack`, and their values."""
    x, how = finite(4 * size, dtype, format).view(size, 4), (format, "nearest_even", "saturate", None)
    codes = quant.encode(x, format)
    packed = pack(codes, format.bits, format.high_nibble_first)
    yield Case(packed, coded(run, x, torch.empty_like(packed, device=device), *how, packed=True), "codes")
    back = coded(decode, packed, torch.empty_like(x, device=device), format, packed=True)
    yield Case(quant.decode(codes, format, dtype), back, "values")


def _decode(format: formats.Format, device: torch.device, dtype: torch.dtype, run: Run) -> Cases:
    """Every code of the format."""
    codes = torch.arange(1 << format.bits, dtype=torch.int64, device="cpu").to(CONTAINERS[format.storage_bits])
    found = coded(run, codes, torch.empty_like(codes, dtype=dtype, device=device), format)
    yield Case(quant.decode(codes, format, dtype), found, "", codes)


def _posit(format: formats.Posit, device: torch.device, dtype: torch.dtype, size: int, run: Run) -> Cases:
    x, how = hard(size, dtype, format), (format, "nearest_even")
    out, codes = (torch.empty_like(x, dtype=to, device=device) for to in (dtype, CONTAINERS[format.storage_bits]))
    yield Case(quant.round_to(x, format), written(run, x, out, *how), "values", x)
    yield Case(quant.encode(x, format), written(run, x, codes, *how), "codes", x)


def _finish(dtype: torch.dtype, device: torch.device, rows: int, columns: int, biased: str) -> Cases:
    """Results that fill blocks and that do not; biases shorter and longer than a block."""
    product, bias, scale = hard(rows * columns).view(rows, columns), hard(columns, dtype), scalar(0.3)
    wide = product * scale + bias if biased else product * scale
    found = gpu_cast.run_finish(product.to(device), scale.to(device), bias.to(device) if biased else None, dtype)
    yield Case(wide.to(dtype), found, "", product)


def _seeds(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], count: int) -> Cases:
    """For tensors of any number of dimensions, contiguous and with other strides."""
    x, key = hard(prod(shape), dtype).view(shape), torch.tensor([2**62 + 5, -3], dtype=torch.int64, device="cpu")
    for one in (x, x.mT[..., ::2]) if len(shape) > 1 else (x,):
        found = gpu_cast.run_seeds(one.to(device), key.to(device), count, operator.steps(one))
        yield Case(operator.by_torch(one, key, count), found, str(one.stride()))


def _history(format: formats.Format, device: torch.device, scaling: Delayed, skipped: float | None) -> Cases:
    """Various states at the end of a step, and of a skipped step."""
    generator = torch.Generator().manual_seed(scaling.history)
    states = torch.rand((12, 1 + scaling.history), generator=generator, dtype=torch.float32, device="cpu")
    states[::2, 1:] *= states[::2, 1:] > 0.7
    states[1::3, 0] = 0.0
    states[:5, 1] = torch.tensor([0.0, torch.inf, torch.nan, 2.0**-130, 1e38], dtype=torch.float32, device="cpu")
    states[7, -1] = torch.inf
    expected, own = states.clone(), [row.clone().to(device) for row in states]
    if skipped:
        expected[:, 1] = 0.0
    else:
        scaling.advance(expected, format)
    places = history.places([row.data_ptr() for row in own], own[0].device)
    history.run(places, scaling, format, None if skipped is None else scalar(skipped, device))
    yield Case(expected, torch.stack(own))


_SIZES, _GPU_SIZES = (0, 1, 17, (1 << 14) + 3), (0, 1, 17, (1 << 13) + 3)
"""Nothing, one element, part of a vector, and several chunks or blocks plus a rest."""
_KINDS, _FLOATS, _OVERFLOWS = (hard, finite), FLOAT32 | BFLOAT16 | FLOAT16, ("saturate", "ieee")
_SCALED = FP8 | named(formats.get, "e4m3fnuz", "e2m1fn")
_EVERY = _SCALED | named(formats.get, "e3m2fn", "int8", "bf16", "fp16")
_PACKED = named(formats.get, "e2m1fn", "e3m2fn", "int4", "uint4", "nf4")
_DECODED = _EVERY | named(formats.get, "int4", "uint4", "nf4", "posit16_1", "float8_e8m0fnu")
_POSITS = named(formats.get, "posit8_2", "posit16_1", "posit16_2")
CPU = (
    *kernel_tests("cast", _EVERY, _cast, product(DTYPES, _SIZES, ROUNDINGS, _OVERFLOWS, [""]), run=cast.run),
    *kernel_tests(
        "scaled", _SCALED, _scaled, product(DTYPES[:2], _SIZES, DTYPES[:2], _KINDS, ("", "noted")), run=cast.run,
    ),
    *kernel_tests("amax", _FLOATS, _amax, product(_SIZES, _KINDS, [None]), run=amax.run),
    *kernel_tests("posit", _POSITS, _posit, product(DTYPES[:1], _SIZES), run=posit.run),
    *kernel_tests("codes", _EVERY, _codes, product(DTYPES[:1], _SIZES, ROUNDINGS), run=codes.run),
    *kernel_tests("packed", _PACKED, _packed, product(DTYPES[:1], _SIZES), run=codes.run, decode=codes.run_decode),
    *kernel_tests("decode", _DECODED, _decode, product(DTYPES[:2]), run=codes.run_decode),
)  # fmt: skip
GPU = (
    *kernel_tests("cast", _EVERY, _cast, product(DTYPES, _GPU_SIZES, ROUNDINGS, _OVERFLOWS, [""]), run=gpu_cast.run),
    *kernel_tests(
        "chunks of noise", named(formats.get, "float8_e4m3fn"), _cast,
        product(DTYPES, [(1 << 14) + 3000], ["stochastic"], ["saturate"], ("", "a seed in memory")), run=gpu_cast.run,
    ),
    *kernel_tests(
        "scaled", _SCALED, _scaled, product(DTYPES, _GPU_SIZES, [torch.bfloat16], _KINDS, ["noted"]), run=gpu_cast.run,
    ),
    *kernel_tests("codes", _EVERY, _codes, product(DTYPES, _GPU_SIZES, ROUNDINGS), run=gpu_cast.run_codes),
    *kernel_tests(
        "codes by integers", FP8, _codes, product(DTYPES, _GPU_SIZES, ROUNDINGS[:1]), run=gpu_cast.run_codes,
        by_integers=True,
    ),
    *kernel_tests(
        "packed", _PACKED, _packed, product(DTYPES, _GPU_SIZES), run=gpu_cast.run_codes, decode=gpu_cast.run_decode,
    ),
    *kernel_tests("decode", _DECODED, _decode, product(DTYPES), run=gpu_cast.run_decode),
    *kernel_tests(
        "posit", _POSITS, _posit, product(DTYPES, _GPU_SIZES), run=gpu_cast.run_posit,
    ),
    *kernel_tests(
        "amax", _FLOATS, _amax, product((*_GPU_SIZES, (1 << 14) + 5), _KINDS, (None, -0.0, 1e-45, torch.nan)),
        run=gpu_amax.run,
    ),
    *kernel_tests(
        "finish", BFLOAT16 | FLOAT16, _finish,
        [(*shape, biased) for shape in ((1, 1), (7, 300), (3, 5000)) for biased in ("", "biased")],
    ),
    *kernel_tests(
        "seeds", _FLOATS, _seeds,
        [((), 1), ((5000,), 3), ((160, 96), 6), ((3, 20, 33), 6), ((2, 3, 40, 17), 6), ((33, 0), 3)],
    ),
    *kernel_tests(
        "history", FP8, _history,
        product(
            (
                Delayed("delayed"), Delayed("delayed", history=1),
                Delayed("delayed", history=16, algorithm="most_recent", warmup=3),
                Delayed("delayed", history=33, warmup=0, restart=True),
            ),
            (None, 0.0, 1.0),
        ),
    ),
)  # fmt: skip
