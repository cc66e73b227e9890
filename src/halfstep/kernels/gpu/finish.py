"""What follows an emulated matmul in one pass: its float32 result times a scale, plus a bias, rounded."""

import torch
from torch import Tensor

from halfstep.kernels.gpu.launch import BLOCK, KINDS, bits, functions, launch
from halfstep.kernels.gpu.quantizers import half


def run(product: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`(product * scale + bias).to(dtype)`, each operation rounded to float32: 6 bytes an element instead of 18.

    Args:
        product: (rows, columns), float32, that `launch.lies_plain`.
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
