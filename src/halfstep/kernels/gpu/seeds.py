"""Seeds that follow from a key and from a tensor's numbers, by one launch: what torch's operators take twenty for."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from halfstep.kernels.gpu.launch import KINDS, functions, prepared


_BLOCK = 1024


def run(x: Tensor, key: Tensor, count: int, steps: Sequence[int]) -> Tensor | None:
    """`kernels.seeds.seeds` of a sample of x with these steps along its dimensions: int64 (count). None where that is
    not done here: it takes fp32, bf16 and fp16 of at most four dimensions, of any strides, and a key beside it."""
    if x.dtype not in KINDS or x.dim() > 4 or x.is_neg() or key.device != x.device:
        return None
    counts = [-(-size // step) for size, step in zip(x.shape, steps, strict=True)]
    apart = [stride * step for stride, step in zip(x.stride(), steps, strict=True)]
    fill = 4 - x.dim()
    counts, apart = [1] * fill + counts, [0] * fill + apart
    out = torch.empty(count, dtype=torch.int64, device=x.device)
    launch = prepared(
        functions("elementwise").seeds, x.device, as_bits=True, varying=(0, 1), kinds=(x.dtype, max(apart) >> 31),
        COUNT=count, ROOM=1 << (count - 1).bit_length(), B=_BLOCK,
    )  # fmt: skip
    launch(1, x, key, out, prod(counts), *counts[1:], *apart)
    return out
