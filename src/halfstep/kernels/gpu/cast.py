"""`quant.round_to` and `quant.encode` of CUDA tensors: floats and integers, fp32, bf16 and fp16, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.kernels.cpu import element_codes, elements
from halfstep.kernels.cpu.arrays import separate
from halfstep.kernels.cpu.element_codes import Coding
from halfstep.kernels.cpu.elements import Rounding
from halfstep.kernels.gpu.launch import BLOCK, KINDS, bits, functions, halves, launch, plain


_CONTAINERS = {8: torch.uint8, 16: torch.uint16}


def supports(x: Tensor, out: Tensor, format: Format, rounding: str, overflow: str) -> bool:
    """Whether `run` can round `x` into `out`: contiguous CUDA tensors of one shape, the same one or apart in memory."""
    return plain(x) and plain(out) and takes(x, out, format, overflow)


def takes(x: Tensor, out: Tensor, format: Format, overflow: str, factor: bool = False) -> bool:
    """The same, of dense tensors anywhere; with a factor x has all of float32's bits."""
    known = x.shape == out.shape and separate(x, out) and elements.knows(format)
    return known and elements.holds(format, overflow, torch.float32 if factor else x.dtype, out.dtype)


def supports_scaled(x: Tensor, out: Tensor, format: Format) -> bool:
    """Whether `run` can round `x` times a factor into `out`, saturating."""
    return plain(x) and plain(out) and takes(x, out, format, "saturate", factor=True)


def supports_codes(x: Tensor, out: Tensor, format: Format) -> bool:
    """Whether `run_codes` can write the codes of `x` to `out`, in a byte or two each: contiguous CUDA tensors."""
    return plain(x) and takes_codes(x, out, format) and plain(out, out.dtype)


def takes_codes(x: Tensor, out: Tensor, format: Format) -> bool:
    """The same, of dense tensors anywhere. A format without a code for NaN is left to who can say so."""
    return (
        format.has_nan
        and element_codes.knows(format)
        and x.shape == out.shape
        and out.dtype == _CONTAINERS[format.storage_bits]
    )


def run(
    x: Tensor,
    out: Tensor,
    format: Format,
    rounding: str,
    overflow: str,
    seed: int | None,
    factor: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """Write `x`, rounded, to `out`: as `kernels.cpu.cast.run`, of which every bit is equal."""
    numbers = elements.scalars(format, rounding, overflow, out.dtype)
    _launch(x, out, numbers, None, KINDS[out.dtype], rounding, seed, factor, amax)


def run_codes(
    x: Tensor,
    out: Tensor,
    format: Format,
    rounding: str,
    overflow: str,
    seed: int | None,
    factor: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """Write the codes of `x`, times a factor, to `out`."""
    numbers, codes = element_codes.scalars(format, rounding, overflow)
    coding = Coding(*map(int, codes))
    _launch(x, out, numbers, coding, f"uint{8 * out.itemsize}", rounding, seed, factor, amax)


def _launch(
    x: Tensor,
    out: Tensor,
    numbers: elements.Scalars,
    coding: Coding | None,
    target: str,
    rounding: str,
    seed: int | None,
    factor: Tensor | None,
    amax: Tensor | None,
) -> None:
    n = x.numel()
    launch(
        functions("cast").cast, -(-n // BLOCK),
        bits(x), bits(out), None if factor is None else bits(factor), None if amax is None else bits(amax), n,
        *halves(seed),
        device=x.device, P=Rounding(*map(int, numbers)), C=coding, SOURCE=KINDS[x.dtype], TARGET=target,
        NOISY=rounding == "stochastic", B=BLOCK,
    )  # fmt: skip
