"""Elementwise kernels on CUDA tensors: rounding, encoding, decoding, scaling a matmul's result, seeds."""

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from halfstep import formats
from halfstep.kernels.cpu import element_codes, elements, posit
from halfstep.kernels.cpu.arrays import separate
from halfstep.kernels.cpu.codes import lie_in, shifts
from halfstep.kernels.cpu.lanes import INFINITY
from halfstep.kernels.gpu import BLOCK, KINDS, bits, capability, functions, halves, is_dense, launch, prepared
from halfstep.quant.rounding import Seed


CONVERTED = {formats.get("float8_e4m3fn").key: "e4m3", formats.get("float8_e5m2").key: "e5m2"}
"""The formats that a GPU instruction converts to, by key."""
ADA = (8, 9)
"""The first compute capability with that instruction."""


def run(
    x: Tensor,
    out: Tensor,
    format: formats.Format,
    rounding: str,
    overflow: str,
    seed: Seed | None,
    factor: Tensor | None = None,
    amax: Tensor | None = None,
) -> bool:
    """Write x * factor, rounded, to `out`, with the bits of `kernels.cpu.cast.run`. False where no kernel supports it:
    both must be dense and contiguous, of one shape, and either the same tensor or not overlapping."""
    known = elements.scalars(format, rounding, overflow, out.dtype, x.dtype if factor is None else torch.float32)
    if known is None or not (is_dense(x) and is_dense(out) and x.shape == out.shape and separate(x, out)):
        return False
    numbers = elements.Rounding(*map(int, known))
    _launch(x, out, numbers, None, KINDS[out.dtype], rounding, seed, factor, None if amax is None else bits(amax))
    return True


def run_codes(
    x: Tensor,
    out: Tensor,
    format: formats.Format,
    rounding: str,
    overflow: str,
    seed: Seed | None,
    factor: Tensor | None = None,
    amax: Tensor | None = None,
    packed: bool = False,
    by_integers: bool = False,
) -> bool | None:
    """Write the codes of x * factor to `out`. False: x has a NaN and the format has no code for it; checked for such
    formats alone, and the host synchronizes for it. None where no kernel supports it: the tensors must be dense and
    contiguous, with codes of one or two bytes.

    `packed`: 4- and 6-bit codes are packed along the rows of `out`, which they fill, as by `quant.pack`. by_integers:
    do not use the GPU's own conversion to these codes (`instruction`).
    """
    known = element_codes.scalars(format, rounding, overflow) if is_dense(x) and is_dense(out, out.dtype) else None
    if known is None or not lie_in(out, x, format, packed):
        return None
    numbers, codes = (tuple(map(int, part)) for part in known)
    found = None if amax is None else bits(amax)
    asked = not format.has_nan and x.numel() > 0
    if asked and found is None:
        found = torch.zeros((), dtype=torch.int32, device=x.device)
    packing = tuple(map(int, shifts(format) or ())) if packed else None
    kind = f"uint{8 * out.itemsize}"
    made = None if by_integers or packed else instruction(format, rounding, overflow, x.device)
    how = elements.Rounding(*numbers), element_codes.Coding(*codes), kind, rounding
    _launch(x, out, *how, seed, factor, found, packing, made)
    return not (asked and found is not None and int(found) > INFINITY)


def instruction(format: formats.Format, rounding: str, overflow: str, device: torch.device) -> str | None:
    """The name of the GPU's own conversion to the format's codes, or None: for E4M3 and E5M2, to nearest, saturating,
    from compute capability 8.9 on. It was compared with the reference for all 2^32 float32 inputs on an H100."""
    known = rounding == "nearest_even" and overflow == "saturate"
    return CONVERTED.get(format.key) if known and capability(device) >= ADA else None


def _launch(
    x: Tensor,
    out: Tensor,
    numbers: elements.Rounding,
    coding: element_codes.Coding | None,
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
        functions("elementwise").cast, -(-n // BLOCK),
        bits(x), bits(out), None if factor is None else bits(factor), found, n, *halves(seed),
        device=x.device, P=numbers, C=coding, SOURCE=KINDS[x.dtype], TARGET=target,
        NOISY=rounding == "stochastic", INSTRUCTION=instruction, PACKED=packed, B=BLOCK,
    )  # fmt: skip


def run_posit(x: Tensor, out: Tensor, format: formats.Posit, rounding: str) -> bool:
    """Write x, rounded to the nearest posit, to `out`: values, or codes if `out` is an integer tensor. False where no
    kernel supports it: both must be dense and contiguous, of one shape, and either the same tensor or not
    overlapping."""
    numbers = posit.scalars(format, rounding, x.dtype, out.dtype) if is_dense(x) and is_dense(out, out.dtype) else None
    if numbers is None or x.shape != out.shape or not separate(x, out):
        return False
    n = x.numel()
    launch(
        functions("elementwise").posit, -(-n // BLOCK), bits(x), bits(out), n,
        device=x.device, P=posit.Cutting(*map(int, numbers)), SOURCE=KINDS[x.dtype],
        TARGET=KINDS.get(out.dtype, f"uint{8 * out.itemsize}"), B=BLOCK,
    )  # fmt: skip
    return True


def run_decode(codes: Tensor, out: Tensor, format: formats.Format, packed: bool = False) -> bool | None:
    """Write the values of `codes` to `out`. False: a code has more bits than the format; checked where codes are stored
    in wider integers, and the host synchronizes for it. None where no kernel supports it: the tensors must be dense and
    contiguous, and `out` fp32, bf16 or fp16."""
    known = format.bits <= 16 and is_dense(out) and is_dense(codes, codes.dtype)
    if not known or not lie_in(codes, out, format, packed):
        return None
    n, found, table, numbers = out.numel(), None, None, _numbers(format, out.dtype)
    if not packed and format.bits != format.storage_bits and n:
        found = torch.zeros((), dtype=torch.int32, device=out.device)
    if numbers is None:
        table = bits(_table(format, out.dtype, out.device))
    launch(
        functions("elementwise").decode, -(-n // BLOCK),
        bits(codes), bits(out), table, found, n, (1 << format.bits) - 1,
        device=out.device, D=numbers, WHOLE=isinstance(format, formats.Integer), TARGET=KINDS[out.dtype],
        PACKED=tuple(map(int, shifts(format) or ())) if packed else None, B=BLOCK,
    )  # fmt: skip
    return found is None or not int(found) >> format.bits


@cache
def _numbers(format: formats.Format, dtype: torch.dtype) -> Any:
    """The constants for decoding by arithmetic; None where values come from a table, or need rounding to the dtype."""
    found = element_codes.decoding_scalars(format, dtype)
    if found is None:
        return None
    numbers = tuple(map(int, found))
    return numbers if isinstance(format, formats.Integer) else element_codes.Decoding(*numbers)


@cache
def _table(format: formats.Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    return element_codes.table(format, dtype).to(device)


# ---- what follows an emulated matmul: its float32 result times a scale, plus a bias, rounded -------------------------


@cache
def half() -> elements.Rounding:
    """The rounding of float32 to float16 as torch does it."""
    return elements.Rounding(*map(int, elements.scalars(formats.get("fp16"), "nearest_even", "ieee", torch.float16)))


def run_finish(product: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`(product * scale + bias).to(dtype)`, with each operation rounded to float32: 6 bytes of traffic an element, not
    18.

    Args:
        product: (rows, columns), float32, `is_dense`.
        scale: a float32 scalar.
        bias: (columns), contiguous, in `dtype`: bf16 or fp16.
    """
    out = torch.empty(product.shape, dtype=dtype, device=product.device)
    launch(
        functions("elementwise").finish, -(-product.numel() // BLOCK),
        bits(product), scale.detach(), None if bias is None else bits(bias), bits(out), product.numel(),
        product.shape[1], device=product.device, TARGET=KINDS[dtype], HALF=half(), B=BLOCK,
    )  # fmt: skip
    return out


# ---- seeds that follow from a key and from a tensor's numbers: what torch's operators take twenty launches for -------

_SAMPLE = 1024


def run_seeds(x: Tensor, key: Tensor, count: int, steps: Sequence[int]) -> Tensor | None:
    """`kernels.operator.seeds` of a sample of x with these steps along its dimensions: int64 (count). None where no
    kernel supports it: x must be fp32, bf16 or fp16 with at most four dimensions, of any strides, and `key` on its
    device."""
    if x.dtype not in KINDS or x.dim() > 4 or x.is_neg() or key.device != x.device:
        return None
    counts = [-(-size // step) for size, step in zip(x.shape, steps, strict=True)]
    apart = [stride * step for stride, step in zip(x.stride(), steps, strict=True)]
    fill = 4 - x.dim()
    counts, apart = [1] * fill + counts, [0] * fill + apart
    out = torch.empty(count, dtype=torch.int64, device=x.device)
    launch = prepared(
        functions("elementwise").seeds, x.device, as_bits=True, varying=(0, 1), kinds=(x.dtype, max(apart) >> 31),
        COUNT=count, ROOM=1 << (count - 1).bit_length(), B=_SAMPLE,
    )  # fmt: skip
    launch(1, x, key, out, prod(counts), *counts[1:], *apart)
    return out
