"""Every Triton kernel against the reference, bit for bit: on a GPU by `halfstep doctor`, on CPUs by the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from halfstep import formats, quant
from halfstep.kernels.gpu import cast
from halfstep.kernels.selftest import Case, Outcome, hard, outcome, words
from halfstep.quant.cast import CONTAINERS


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
    return ((kernel, name, test) for kernel, names, test in _TESTS for name in names)


def _cast(name: str, device: torch.device) -> Iterator[Case]:
    format = formats.get(name)
    for dtype in _DTYPES:
        for size in SIZES:
            x = hard(size, dtype, format)
            for rounding in _ROUNDINGS:
                for overflow in ("saturate", "ieee"):
                    out, seed = torch.full_like(x, 7, device=device), _SEED if rounding == "stochastic" else None
                    if cast.takes(x, out, format, overflow):
                        cast.run(x.to(device), out, format, rounding, overflow, seed)
                        expected = quant.round_to(x, format, rounding, overflow, seed)
                        yield expected, out.cpu(), x, words(x, rounding, overflow)


def _codes(name: str, device: torch.device) -> Iterator[Case]:
    format = formats.get(name)
    for dtype in _DTYPES:
        for size in SIZES:
            x = hard(size, dtype, format)
            for rounding in _ROUNDINGS:
                seed = _SEED if rounding == "stochastic" else None
                out = torch.empty(size, dtype=CONTAINERS[format.storage_bits], device=device)
                if cast.takes_codes(x, out, format):
                    cast.run_codes(x.to(device), out, format, rounding, "saturate", seed)
                    yield quant.encode(x, format, rounding, "saturate", seed), out.cpu(), x, words(x, rounding, "codes")


_TESTS: tuple[tuple[str, tuple[str, ...], Test], ...] = (
    ("cast", _FORMATS, _cast),
    ("codes", tuple(name for name in _FORMATS if formats.get(name).has_nan), _codes),
)
