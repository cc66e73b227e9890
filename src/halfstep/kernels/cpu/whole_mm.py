"""Integer matmuls of int8 operands, summed exactly: rows of 4-bit values with a scale each."""

from typing import Any, Protocol

import numba
import torch
from torch import Tensor

from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel, each
from halfstep.kernels.cpu.lanes import nearest_as
from halfstep.kernels.cpu.runs import elementwise
from halfstep.kernels.operator import Operator, blank, plus, times


class Operand(Protocol):
    """A matrix as `ops.operand` makes it."""

    @property
    def values(self) -> Tensor: ...

    @property
    def scale(self) -> Tensor | None: ...


_LARGEST = 1 << 17  # of the shared dimension: 127^2 times it stays below 2^31


def run(
    lhs: Operand, rhs: Operand, bias: Tensor | None, dtype: torch.dtype, multiplier: float | None, more: Tensor | None
) -> Tensor | None:
    """lhs (rows, shared) @ rhs (shared, columns), times both scales and multiplier, plus `more` (rows, columns) and
    bias (columns), in float32, rounded once to dtype.

    With a shared dimension up to 2^24 / 127^2, and 116,508 for FP4, the sum has the bits of float32's, which is exact
    there. None unless both are int8, with a scale for each row of lhs and each column of rhs.
    """
    if lhs.values.dtype != torch.int8 or rhs.values.dtype != torch.int8 or lhs.values.shape[1] > _LARGEST:
        return None
    if lhs.scale is None or lhs.scale.shape != (lhs.values.shape[0], 1):
        return None
    if rhs.scale is None or rhs.scale.shape != (1, rhs.values.shape[1]):
        return None
    first = lhs.scale if multiplier is None else lhs.scale * multiplier
    out = torch.empty(lhs.values.shape[0], rhs.values.shape[1], dtype=dtype, device=lhs.values.device)
    _WHOLE_MM(lhs.values, rhs.values, first, rhs.scale, bias, more, out)
    return out


def _into(
    lhs: Tensor, rhs: Tensor, first: Tensor, second: Tensor, bias: Tensor | None, more: Tensor | None, out: Tensor
) -> None:
    if blank(lhs, out):
        return
    sums = _sums(lhs, rhs)
    known = plain(sums, torch.int32) and plain(out, torch.float32, torch.bfloat16)
    if known and (more is None or plain(more, torch.float32)) and (bias is None or bias.dtype != torch.float64):
        given = array(sums).reshape(sums.shape), array(first.contiguous(), torch.float32), _flat(second)
        extra = None if more is None else array(more, torch.float32).reshape(more.shape)
        _finish(
            out.numel(), *given, extra, None if bias is None else _flat(bias.float()), array(out).reshape(out.shape)
        )
        return
    y = times(sums.float(), first * second)
    if more is not None:
        y = plus(y, more)
    out.copy_(y if bias is None else plus(y, bias))


def _sums(lhs: Tensor, rhs: Tensor) -> Tensor:
    """The integer sums, in a dtype that holds them exactly."""
    if lhs.device.type == "cpu" and lhs.numel() and rhs.numel():
        return torch._int_mm(lhs, rhs)
    return torch.mm(lhs.double(), rhs.double())  # torch's int8 matmul on GPUs needs aligned sizes


def _flat(row: Tensor) -> Any:
    return array(row.contiguous(), torch.float32)


@elementwise
def _row(total, first, second, more, bias, like):
    y = total.value_as_float() * (first * second)
    y = y if more is None else y + more
    return nearest_as(y if bias is None else y + bias, like)


@Kernel
def _finish(sums, first, second, more, bias, out):
    for r in numba.prange(sums.shape[0]):
        _row(out[r], sums[r], first[r], second, each(more, r), bias)


_WHOLE_MM = Operator(
    "whole_mm(Tensor lhs, Tensor rhs, Tensor first, Tensor second, Tensor? bias, Tensor? more, Tensor(a!) out) -> ()",
    _into,
)
