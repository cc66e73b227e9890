"""Tensors as the numpy arrays that kernels take, and which tensors can be taken so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


_VIEWS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""numpy has no bfloat16, so the dtype of an array says what its bits are (`lanes.bits_of`)."""


def plain(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether this is a dense contiguous CPU tensor of one of the dtypes (fp32, bf16 and fp16 where none is named)."""
    return (
        tensor.dtype in (dtypes or _VIEWS)
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def separate(x: Tensor, out: Tensor) -> bool:
    """Whether `out` is `x`, element for element, or shares no memory with it."""
    if x.data_ptr() == out.data_ptr():
        return x.dtype == out.dtype
    return x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def array(tensor: Tensor) -> Any:
    """A plain tensor as a flat array: float32 as uint32, bfloat16 as uint16, float16 as int16, others as they are."""
    stored = _VIEWS.get(tensor.dtype)
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return (tensor if stored is None else tensor.view(stored)).numpy().reshape(-1)
