"""FP8 products on a GPU's own FP8 units, through torch.nn.functional.scaled_mm."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import formats
from halfstep.formats import Format
from halfstep.quant import Quantizer
from halfstep.quant.tile import ROW, TENSOR


class Operand(Protocol):
    """A matrix of FP8 numbers, `values` times `scale`: a float32 scalar, or one number a row or column."""

    @property
    def values(self) -> Tensor: ...

    @property
    def scale(self) -> Tensor | None: ...


_ALIGNED = 16  # both the shared dimension and the columns must be multiples of it


_DTYPES = {formats.get(dtype).key: dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}


def dtype_of(format: Format) -> torch.dtype | None:
    """torch's dtype of a format that FP8 units take."""
    return _DTYPES.get(format.key)


def native_dtype(quantizer: Quantizer, device: torch.device) -> torch.dtype | None:
    """The dtype in which FP8 units there take operands of that quantizer; None where they do not, or there are none."""
    if _capability(device) == (0, 0) or refusal(quantizer, device) is not None:
        return None
    return dtype_of(quantizer.format)


def refusal(quantizer: Quantizer, device: torch.device) -> str | None:
    """Why operands of that quantizer are not multiplied by FP8 units there; None where they are."""
    if (why := _lacks_units(device)) is not None:
        return why
    if dtype_of(quantizer.format) is None:
        return f"{quantizer.format.name}: FP8 units take float8_e4m3fn and float8_e5m2"
    tile = quantizer.scales and quantizer.scales.tile
    if tile not in (TENSOR, ROW, ROW.transposed):
        return f"tiles of {tile}: this path takes one scale a tensor or a row"
    if tile != TENSOR and _capability(device) < (9, 0):
        return "a scale a row needs compute capability 9.0"
    return None


def _lacks_units(device: torch.device) -> str | None:
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; 2.10 and newer do"
    if _capability(device) == (0, 0):
        return f"no FP8 units on {device.type} here"
    if _capability(device) < (8, 9):
        return f"compute capability {'.'.join(map(str, _capability(device)))}: FP8 units came with 8.9"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a traced graph takes the answer


def supports(lhs: Operand, rhs: Operand, dtype: torch.dtype) -> bool:
    """Whether these two have a native product in `dtype`: of FP8 units' dtypes, not both E5M2, with aligned sides."""
    dtypes = {lhs.values.dtype, rhs.values.dtype}
    whole = all(side.scale is not None and side.scale.dim() == 0 for side in (lhs, rhs))
    return (
        dtypes <= set(_DTYPES.values())
        and dtypes != {torch.float8_e5m2}
        and dtype in ((torch.bfloat16, torch.float16) if whole else (torch.bfloat16,))
        and all(size % _ALIGNED == 0 and size for size in rhs.values.shape)
        and lhs.values.shape[0] > 0
    )


def run(lhs: Operand, rhs: Operand, bias: Tensor | None, dtype: torch.dtype, multiplier: float | None = None) -> Tensor:
    """lhs (rows, shared) times rhs (shared, columns), each times its scale, times multiplier, plus bias, rounded to
    dtype.

    The units sum in float32 registers of their own accuracy; torch is asked for the accurate accumulation, not for
    the fast one.
    """
    kinds: Any = F.ScalingType
    scales = [_scale(side) for side in (lhs, rhs)]
    if multiplier is not None:
        scales[0] = scales[0] * multiplier
    rows, columns = lhs.values.shape[0], rhs.values.shape[1]
    kind = kinds.TensorWise
    if any(scale.dim() for scale in scales):
        kind = kinds.RowWise
        scales = [scales[0].expand(rows, 1).contiguous(), scales[1].expand(1, columns).contiguous()]
    return F.scaled_mm(
        lhs.values.contiguous(),
        rhs.values.t().contiguous().t(),
        scales[0],
        kind,
        scales[1],
        kind,
        bias=None if bias is None else bias.to(dtype),
        output_dtype=dtype,
    )


def _scale(side: Operand) -> Tensor:
    return side.values.new_ones((), dtype=torch.float32) if side.scale is None else side.scale
