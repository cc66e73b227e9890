"""Tensors as the numpy arrays that kernels take, without copies, and which tensors are supported."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import ModelError


_VIEWS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""numpy has no bfloat16, so an array's integer dtype says which float its bits are (`lanes.bits_of`)."""


def plain(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether this is a dense contiguous CPU tensor of one of the dtypes (default: fp32, bf16 and fp16)."""
    return (
        tensor.dtype in (dtypes or _VIEWS)
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def separate(x: Tensor, out: Tensor) -> bool:
    """Whether `out` is x itself, with the same dtype, or has another storage."""
    if x.data_ptr() == out.data_ptr():
        return x.dtype == out.dtype
    return x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def array(tensor: Tensor, dtype: torch.dtype | None = None, kept: bool = True) -> Any:
    """A plain tensor's storage as a flat array: float32 as uint32, bfloat16 as uint16, float16 as int16, other dtypes
    as they are; or as `dtype`, which has the same size.

    It does not use `Tensor.numpy`, which marks the storage as not resizable: FSDP2, which frees a layer's gathered
    weights after each use by resizing their storage to 0, would then fail.

    Args:
        kept: whether the array keeps the tensor alive; False for a caller that checks for itself that the storage still
            exists.
    """
    assert dtype is None or dtype.itemsize == tensor.itemsize, f"{tensor.dtype} taken for {dtype}"
    kind = _BITS[tensor.dtype] if dtype is None else _TYPES[dtype]
    place = (tensor.data_ptr() or _nowhere(tensor), False)
    interface = {"version": 3, "typestr": kind, "shape": (tensor.numel(),), "data": place}
    return np.asarray(SimpleNamespace(__array_interface__=interface, tensor=tensor if kept else None))


def _nowhere(tensor: Tensor) -> int:
    """The address for an empty tensor.

    Raises:
        ModelError: the tensor is not empty, but has no storage.
    """
    if tensor.numel():
        raise ModelError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no storage that a kernel can read; expected "
            "a plain tensor: to_local() of a DTensor, wait() of a collective's result"
        )
    return _NOWHERE


def empty(size: int, dtype: torch.dtype) -> Any:
    """An uninitialised array of that size, in the form that `array` gives of a dtype."""
    return np.empty(size, _BITS[dtype])


def widened(numbers: Any) -> Any:
    """An array of `array` with 16- or 32-bit floats, as float32."""
    if numbers.dtype == np.uint16:
        return np.left_shift(numbers, 16, dtype=np.uint32).view(np.float32)
    return numbers.view(np.float32) if numbers.itemsize == 4 else numbers.view(np.float16).astype(np.float32)


_NOWHERE = 64
"""An address for arrays without elements, aligned as any is: numpy 2.0 does not take 0."""


_TYPES = {
    dtype: np.dtype(str(dtype).removeprefix("torch.")).str
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint8, torch.uint16, torch.uint32,
    )
}  # fmt: skip
_BITS = _TYPES | {dtype: _TYPES[bits] for dtype, bits in _VIEWS.items()}
