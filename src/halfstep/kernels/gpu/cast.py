"""`quant.round_to` and `quant.encode` of CUDA tensors: floats and integers, fp32, bf16 and fp16, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep import formats
from halfstep.formats import Format
from halfstep.kernels.cpu import element_codes, elements, packing
from halfstep.kernels.cpu.arrays import separate
from halfstep.kernels.cpu.element_codes import Coding
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.cpu.lanes import INFINITY
from halfstep.kernels.gpu.launch import BLOCK, KINDS, bits, capability, functions, halves, launch, lies_plain
from halfstep.quant.rounding import Seed


CONVERTED = {formats.get("float8_e4m3fn").key: "e4m3", formats.get("float8_e5m2").key: "e5m2"}
"""Formats whose codes an instruction makes, by their keys."""
ADA = (8, 9)
"""The compute capability from which on GPUs have it."""


def run(
    x: Tensor,
    out: Tensor,
    format: Format,
    rounding: str,
    overflow: str,
    seed: Seed | None,
    factor: Tensor | None = None,
    amax: Tensor | None = None,
) -> bool:
    """Write `x`, rounded, to `out`: as `kernels.cpu.cast.run`, of which every bit is equal. False where that is not
    done here: it takes dense contiguous tensors of one shape, the same one or apart in memory."""
    known = elements.scalars(format, rounding, overflow, out.dtype, x.dtype if factor is None else torch.float32)
    if known is None or not (lies_plain(x) and lies_plain(out) and x.shape == out.shape and separate(x, out)):
        return False
    numbers = Rounding(*map(int, known))
    _launch(x, out, numbers, None, KINDS[out.dtype], rounding, seed, factor, None if amax is None else bits(amax))
    return True


def run_codes(
    x: Tensor,
    out: Tensor,
    format: Format,
    rounding: str,
    overflow: str,
    seed: Seed | None,
    factor: Tensor | None = None,
    amax: Tensor | None = None,
    packed: bool = False,
    by_integers: bool = False,
) -> bool | None:
    """Write the codes of `x`, times a factor, to `out`. False: there is NaN in x, and the format has no code for it;
    this is asked of such formats alone, and the host waits for the answer. None where that is not done here: it takes
    dense contiguous tensors, and a code of one or two bytes.

    `packed`: 4- and 6-bit codes go to the rows of `out` as `quant.pack` puts them there, and fill them.
    by_integers: also where the GPU has a conversion of its own to these codes (`instruction`).
    """
    known = element_codes.scalars(format, rounding, overflow) if lies_plain(x) and lies_plain(out, out.dtype) else None
    if known is None or not packing.lie_in(out, x, format, packed):
        return None
    numbers, codes = (tuple(map(int, part)) for part in known)
    found = None if amax is None else bits(amax)
    asked = not format.has_nan and x.numel() > 0
    if asked and found is None:
        found = torch.zeros((), dtype=torch.int32, device=x.device)
    shifts = tuple(map(int, packing.shifts(format) or ())) if packed else None
    kind = f"uint{8 * out.itemsize}"
    made = None if by_integers or packed else instruction(format, rounding, overflow, x.device)
    _launch(x, out, Rounding(*numbers), Coding(*codes), kind, rounding, seed, factor, found, shifts, made)
    return not (asked and found is not None and int(found) > INFINITY)


def instruction(format: Format, rounding: str, overflow: str, device: torch.device) -> str | None:
    """The conversion of that GPU that gives the format's codes: of E4M3 and E5M2 to nearest, saturating, from compute
    capability 8.9 on; all 2^32 float32 numbers were compared on an H100. None where there is none."""
    known = rounding == "nearest_even" and overflow == "saturate"
    return CONVERTED.get(format.key) if known and capability(device) >= ADA else None


def _launch(
    x: Tensor,
    out: Tensor,
    numbers: Rounding,
    coding: Coding | None,
    target: str,
    rounding: str,
    seed: Seed | None,
    factor: Tensor | None,
    found: Tensor | None,
    packed: tuple[int, ...] | None = None,
    instruction: str | None = None,
) -> None:
    n = x.numel()
    launch(
        functions("cast").cast, -(-n // BLOCK),
        bits(x), bits(out), None if factor is None else bits(factor), found, n, *halves(seed),
        device=x.device, P=numbers, C=coding, SOURCE=KINDS[x.dtype], TARGET=target,
        NOISY=rounding == "stochastic", INSTRUCTION=instruction, PACKED=packed, B=BLOCK,
    )  # fmt: skip
