"""`quant.round_to` and `quant.encode` of CUDA tensors onto posits, to nearest: `kernels.cpu.posit` has the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.formats import Format, Posit
from halfstep.kernels.cpu import posit
from halfstep.kernels.cpu.arrays import separate
from halfstep.kernels.cpu.posit import Cutting
from halfstep.kernels.gpu.launch import BLOCK, KINDS, bits, functions, launch, lies_plain


_CONTAINERS = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}


def takes(x: Tensor, out: Tensor, format: Format, rounding: str) -> bool:
    """Whether `run` can round `x` into `out`, wherever they are: dense and contiguous, of one shape, the same tensor or
    apart in memory."""
    known = isinstance(format, Posit) and posit.knows(format, rounding) and x.shape == out.shape
    return known and lies_plain(x) and lies_plain(out) and posit.holds(format, x.dtype, out.dtype) and separate(x, out)


def takes_codes(x: Tensor, out: Tensor, format: Format, rounding: str) -> bool:
    """Whether `run` can write the codes of `x` to `out`, wherever they are."""
    known = posit.knows(format, rounding) and x.shape == out.shape and lies_plain(x)
    return known and lies_plain(out, _CONTAINERS[format.storage_bits])


def run(x: Tensor, out: Tensor, format: Posit) -> None:
    """Write `x`, rounded to the nearest posit, to `out`: its value, or its code where these are integers."""
    n = x.numel()
    launch(
        functions("posit").posit, -(-n // BLOCK), bits(x), bits(out), n,
        device=x.device, P=Cutting(*map(int, posit.scalars(format))), SOURCE=KINDS[x.dtype],
        TARGET=KINDS.get(out.dtype, f"uint{8 * out.itemsize}"), B=BLOCK,
    )  # fmt: skip
