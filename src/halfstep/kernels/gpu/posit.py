"""`quant.round_to` and `quant.encode` of CUDA tensors onto posits, to nearest: `kernels.cpu.posit` has the formula."""

from __future__ import annotations

from torch import Tensor

from halfstep.formats import Posit
from halfstep.kernels.cpu import posit
from halfstep.kernels.cpu.arrays import separate
from halfstep.kernels.cpu.posit import Cutting
from halfstep.kernels.gpu.launch import BLOCK, KINDS, bits, functions, launch, lies_plain


def run(x: Tensor, out: Tensor, format: Posit, rounding: str) -> bool:
    """Write `x`, rounded to the nearest posit, to `out`: its value, or its code where these are integers. False where
    that is not done here: it takes dense contiguous tensors of one shape, the same one or apart in memory."""
    numbers = (
        posit.scalars(format, rounding, x.dtype, out.dtype) if lies_plain(x) and lies_plain(out, out.dtype) else None
    )
    if numbers is None or x.shape != out.shape or not separate(x, out):
        return False
    n = x.numel()
    launch(
        functions("posit").posit, -(-n // BLOCK), bits(x), bits(out), n,
        device=x.device, P=Cutting(*map(int, numbers)), SOURCE=KINDS[x.dtype],
        TARGET=KINDS.get(out.dtype, f"uint{8 * out.itemsize}"), B=BLOCK,
    )  # fmt: skip
    return True
