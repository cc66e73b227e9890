"""Every Triton kernel against the reference, bit for bit: on a GPU by `halfstep doctor`, on CPUs by the interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from halfstep import formats, quant
from halfstep.formats import Posit
from halfstep.kernels import selftest_gpu_rotated, selftest_gpu_tiles
from halfstep.kernels.gpu import amax, cast, decode, finish, history, posit
from halfstep.kernels.selftest import Case, Outcome, hard, outcome, words
from halfstep.quant.cast import CONTAINERS
from halfstep.quant.pack import pack
from halfstep.quant.scaling.delayed import Delayed


SIZES = (0, 1, 17, (1 << 13) + 3)
_FORMATS = ("float8_e4m3fn", "float8_e5m2", "e4m3fnuz", "e2m1fn", "e3m2fn", "int8", "bf16", "fp16")
_ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Test = Callable[..., Iterator[Case]]
"""Given the name of a format and a device: what the reference gives there, and what the kernel gave."""
_SEED = 0x9E3779B97F4A7C15


def outcomes(device: torch.device) -> Iterator[Outcome]:
    """Test every kernel, a few formats each, on tensors there: on a CPU Triton's interpreter must be on."""
    for kernel, name, test in tests():
        yield outcome(f"gpu {kernel}", name, partial(test, device=device))


def tests() -> Iterator[tuple[str, str, Test]]:
    """Every kernel with the name of every format that it is tested on, and the test."""
    every = (*_TESTS, *selftest_gpu_tiles.TESTS, *selftest_gpu_rotated.TESTS)
    return ((kernel, name, test) for kernel, names, test in every for name in names)


def _cast(name: str, device: torch.device) -> Iterator[Case]:
    format = formats.get(name)
    for dtype in _DTYPES:
        for size in SIZES:
            x = hard(size, dtype, format)
            for rounding in _ROUNDINGS:
                for overflow in ("saturate", "ieee"):
                    out, seed = torch.full_like(x, 7, device=device), _SEED if rounding == "stochastic" else None
                    if cast.run(x.to(device), out, format, rounding, overflow, seed):
                        expected = quant.round_to(x, format, rounding, overflow, seed)
                        yield expected, out.cpu(), x, words(x, rounding, overflow)


def _chunks(name: str, device: torch.device) -> Iterator[Case]:
    """Noise of two chunks, each with keys of its own."""
    format = formats.get(name)
    for dtype in _DTYPES:
        x = hard((1 << 14) + 3000, dtype, format)
        out = torch.full_like(x, 7, device=device)
        for seed in (_SEED, selftest_gpu_tiles.cell(_SEED, device)):
            cast.run(x.to(device), out.fill_(7), format, "stochastic", "saturate", seed)
            yield quant.round_to(x, format, "stochastic", "saturate", _SEED), out.cpu(), x, words(x, "two chunks")


def _scaled(name: str, device: torch.device) -> Iterator[Case]:
    """Values of x times a factor, in another dtype, with the largest magnitude noted; NaN's bits are above all."""
    format, factor = formats.get(name), torch.tensor(3.7, dtype=torch.float32, device="cpu")
    for dtype, size in itertools.product(_DTYPES, SIZES):
        x, out = hard(size, dtype, format), torch.empty(size, dtype=torch.bfloat16, device=device)
        for known in (x, x.nan_to_num(1.0)):
            largest = torch.full((), 0.5, device=device, dtype=torch.float32)
            given = known.to(device), out, format, "nearest_even", "saturate", None, factor.to(device), largest
            if cast.run(*given):
                wide = known.float() * factor
                expected = quant.round_to(wide, format, "nearest_even", "saturate", None, torch.empty_like(out.cpu()))
                yield expected, out.cpu(), x, words(x, "times a factor")
                magnitudes = torch.cat([known.float().abs(), torch.tensor([0.5], dtype=torch.float32, device="cpu")])
                yield (
                    magnitudes.max(),
                    largest.cpu(),
                    torch.empty(0, dtype=torch.float32, device="cpu"),
                    words(x, "largest magnitude"),
                )


def _codes(name: str, device: torch.device) -> Iterator[Case]:
    format = formats.get(name)
    for dtype, size, rounding in itertools.product(_DTYPES, SIZES, _ROUNDINGS):
        x = hard(size, dtype, format)
        x = x if format.has_nan else x[~x.isnan()]
        seed = _SEED if rounding == "stochastic" else None
        out = torch.empty(x.shape, dtype=CONTAINERS[format.storage_bits], device=device)
        done = cast.run_codes(x.to(device), out, format, rounding, "saturate", seed)
        if done is not None:
            yield _done(done)
            yield quant.encode(x, format, rounding, "saturate", seed), out.cpu(), x, words(x, rounding, "codes")


def _packed(name: str, device: torch.device) -> Iterator[Case]:
    """Codes of 4 and 6 bits in the bytes where `quant.pack` puts them, and the values of these bytes."""
    format = formats.get(name)
    for dtype, size in itertools.product(_DTYPES, SIZES):
        x = hard(4 * size, dtype, format).nan_to_num(1.0).view(size, 4)
        codes = quant.encode(x, format)
        expected = pack(codes, format.bits, format.high_nibble_first)
        out, back = torch.empty_like(expected, device=device), torch.empty_like(x, device=device)
        done = cast.run_codes(x.to(device), out, format, "nearest_even", "saturate", None, packed=True)
        if done is not None:
            yield _done(done)
            yield expected, out.cpu(), torch.empty(0, dtype=torch.float32, device="cpu"), words(x, "packed codes")
        done = decode.run(expected.to(device), back, format, packed=True)
        if done is not None:
            yield _done(done)
            yield (
                quant.decode(codes, format, dtype),
                back.cpu(),
                torch.empty(0, dtype=torch.float32, device="cpu"),
                words(x, "of packed codes"),
            )


def _decode(name: str, device: torch.device) -> Iterator[Case]:
    """Every code of the format."""
    format = formats.get(name)
    codes = torch.arange(1 << format.bits, dtype=torch.int64, device="cpu").to(CONTAINERS[format.storage_bits])
    for dtype in _DTYPES:
        out = torch.empty(codes.shape, dtype=dtype, device=device)
        done = decode.run(codes.to(device), out, format)
        if done is not None:
            yield _done(done)
            yield quant.decode(codes, format, dtype), out.cpu(), codes, words(codes, f"values in {dtype}")


def _posit(name: str, device: torch.device) -> Iterator[Case]:
    format = formats.get(name, Posit)
    for dtype, size in itertools.product(_DTYPES, SIZES):
        x = hard(size, dtype, format)
        out, codes = (
            torch.empty_like(x, device=device),
            torch.empty(size, dtype=CONTAINERS[format.storage_bits], device=device),
        )
        if posit.run(x.to(device), out, format, "nearest_even"):
            yield quant.round_to(x, format), out.cpu(), x, words(x, "values")
        if posit.run(x.to(device), codes, format, "nearest_even"):
            yield quant.encode(x, format), codes.cpu(), x, words(x, "codes")


def _amax(name: str, device: torch.device) -> Iterator[Case]:
    for size in (*SIZES, (1 << 14) + 5):
        x = hard(size, getattr(torch, name))
        for known in (x, x.nan_to_num(1.0)):
            zero = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            nothing = zero.new_empty(0)
            expected = known.float().abs().max() if size else zero
            yield expected, amax.run(known.to(device)).cpu(), nothing, words(x)
            for number in (-0.0, 1e-45, float("nan")):
                wanted = zero if number else expected
                found = amax.run(known.to(device), torch.full((), number, device=device, dtype=torch.float32)).cpu()
                yield wanted, found, nothing, words(x, f"unless {number}")


def _by_integers(name: str, device: torch.device) -> Iterator[Case]:
    """Codes of formats that some GPUs convert to themselves, as others make them."""
    format = formats.get(name)
    for dtype, size in itertools.product(_DTYPES, SIZES):
        x, out = hard(size, dtype, format), torch.empty(size, dtype=torch.uint8, device=device)
        cast.run_codes(x.to(device), out, format, "nearest_even", "saturate", None, by_integers=True)
        yield quant.encode(x, format), out.cpu(), x, words(x, "codes by integers")


def _finish(name: str, device: torch.device) -> Iterator[Case]:
    """Results of whole blocks, and with a rest; biases shorter and longer than a block."""
    dtype = getattr(torch, name)
    for rows, columns in ((1, 1), (7, 300), (3, 5000)):
        product = hard(rows * columns, torch.float32).view(rows, columns)
        scale = torch.tensor(0.3, dtype=torch.float32, device="cpu")
        for bias in (None, hard(columns, dtype)):
            expected, there = product * scale, None if bias is None else bias.to(device)
            expected = expected if bias is None else expected + bias
            found = finish.run(product.to(device), scale.to(device), there, dtype)
            yield expected.to(dtype), found.cpu(), product, words(product, "finished")


_HISTORIES = (
    Delayed("delayed"),
    Delayed("delayed", history=1),
    Delayed("delayed", history=16, algorithm="most_recent", warmup=3),
    Delayed("delayed", history=33, warmup=0, restart=True),
)


def _history(name: str, device: torch.device) -> Iterator[Case]:
    """States of many kinds at the end of a step, of one that was left out too."""
    format, generator = formats.get(name), torch.Generator().manual_seed(0)
    for scaling in _HISTORIES:
        states = torch.rand((12, 1 + scaling.history), generator=generator, dtype=torch.float32, device="cpu")
        states[::2, 1:] = states[::2, 1:] * (states[::2, 1:] > 0.7)
        states[1::3, 0] = 0.0
        states[:5, 1] = torch.tensor(
            [0.0, float("inf"), float("nan"), 2.0**-130, 1e38], dtype=torch.float32, device="cpu"
        )
        states[7, -1] = float("inf")
        for skipped in (None, 0.0, 1.0):
            expected, own = states.clone(), [row.clone().to(device) for row in states]
            if skipped:
                expected[:, 1] = 0.0
            else:
                scaling.advance(expected, format)
            cell = None if skipped is None else torch.tensor(skipped, dtype=torch.float32, device=device)
            places = history.places([row.data_ptr() for row in own], own[0].device)
            history.run(places, scaling, format, cell)
            what = words(states, str(scaling), f"skipped {skipped}")
            yield expected, torch.stack(own).cpu(), torch.empty(0, dtype=torch.float32, device="cpu"), what


def _done(done: bool) -> Case:
    """A case of its own for a kernel's word that it met nothing without a code, or a value."""
    return (
        torch.tensor(True, dtype=torch.bool, device="cpu"),
        torch.tensor(done, dtype=torch.bool, device="cpu"),
        torch.empty(0, dtype=torch.float32, device="cpu"),
        "refused what has a code",
    )


_CODES = ("e2m1fn", "e3m2fn", "int4", "uint4", "nf4")
_TESTS: tuple[tuple[str, tuple[str, ...], Test], ...] = (
    ("cast", _FORMATS, _cast),
    ("chunks of noise", ("float8_e4m3fn",), _chunks),
    ("scaled", _FORMATS[:4], _scaled),
    ("codes", _FORMATS, _codes),
    ("codes by integers", _FORMATS[:2], _by_integers),
    ("packed", _CODES, _packed),
    ("decode", (*_FORMATS, *_CODES[2:], "posit16_1", "float8_e8m0fnu"), _decode),
    ("posit", ("posit8_2", "posit16_1", "posit16_2"), _posit),
    ("amax", ("float32", "bfloat16", "float16"), _amax),
    ("finish", ("bfloat16", "float16"), _finish),
    ("history", _FORMATS[:2], _history),
)
