"""Every format of Triton's casts, in every rounding, overflow mode and pair of dtypes: run by `interpreted.py`."""

import itertools
from collections.abc import Iterator

import torch

from halfstep import formats, quant
from halfstep.formats import Format
from halfstep.formats.exact import ROUNDINGS
from halfstep.kernels.cpu import elements
from halfstep.kernels.gpu import cast
from halfstep.kernels.selftest.case import Case, KernelTest, hard
from halfstep.quant.cast import CONTAINERS


SIZE = 2100  # a block and a rest
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = tuple(itertools.product(ROUNDINGS, ("saturate", "ieee"), DTYPES, DTYPES, (None, 3.7)))
OTHERS = ("e3m4", "e4m5", "e6m9", "e2m3", "e5m7", "e8m3")
STEP = 11
"""A stride through WAYS that leaves two dozen per format, starting at another index for each format."""
SEED = 0x9E3779B97F4A7C15


def tests() -> list[KernelTest]:
    """One test for every format that is rounded by arithmetic or decoded from a table."""
    known = [name for name in (*formats.names(), *OTHERS) if _known(formats.get(name))]
    return [KernelTest("fuzzed casts", name, lambda device, name=name: cases(name)) for name in known]


def _known(format: Format) -> bool:
    return elements.scalars(format, "nearest_even", "saturate") is not None or format.bits <= 16


def cases(name: str, step: int = STEP) -> Iterator[Case]:
    """Every `step`-th way to round, starting at an index that depends on the format; and every code, decoded."""
    format = formats.get(name)
    for rounding, overflow, source, target, factor in WAYS[sum(name.encode()) % step :: step]:
        x = hard(SIZE + 1, source, format)[1:]  # not 16-byte aligned
        seed = SEED if rounding == "stochastic" else None
        name_of_case = f"{rounding}, {overflow}, to {target}, times {factor}"
        wide, times = (x, None) if factor is None else (x.float() * factor, torch.tensor(factor))
        out = torch.full(x.shape, 7.0, dtype=target)
        if cast.run(x, out, format, rounding, overflow, seed, times):
            expected = torch.empty_like(out)
            yield Case(
                quant.round_to(wide, format, rounding, overflow, seed, expected), out, f"of {source}, {name_of_case}", x
            )
        known = ~wide.isnan() if not format.has_nan else torch.ones_like(x, dtype=torch.bool)
        x, wide = x[known], wide[known]
        codes = torch.full(x.shape, 7, dtype=CONTAINERS[format.storage_bits])
        coded = cast.run_codes(x, codes, format, rounding, overflow, seed, times)
        if coded is not None:
            yield Case(torch.tensor(True), torch.tensor(coded), f"of {source}, {name_of_case}, refused")
            yield Case(
                quant.encode(wide, format, rounding, overflow, seed), codes, f"of {source}, {name_of_case}, codes", x
            )
    for target in DTYPES if format.bits <= 16 else ():
        codes = torch.arange(1 << format.bits).to(CONTAINERS[format.storage_bits])
        out = torch.empty(codes.shape, dtype=target)
        if cast.run_decode(codes, out, format):
            yield Case(quant.decode(codes, format, target), out, f"decoded to {target}", codes)
