"""A linear layer as three products of quantised operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels import scaled_mm
from halfstep.ops.matmul import matmul
from halfstep.ops.operand import Operand, operand
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec


States = Mapping[str, Tensor]
"""States of stateful scalings, by operand: `input`, `weight`, `grad_output` (see `recipe.LinearSpec.states`)."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: LinearSpec,
    states: States | None = None,
    record: bool = False,
) -> Tensor:
    """y = x w^T + b, whose forward product and whose two backward products round their operands as `spec` says.

    x is (..., in), weight (out, in), bias (out), y (..., out). Operands are rounded from the dtype they arrive in;
    the products run in autocast's dtype where autocast is on. An empty spec equals `torch.nn.functional.linear`.
    An operand that both of its products round alike, with one scale or square tiles, is rounded once.

    Args:
        states: where the spec has stateful scalings, their states; `nn.apply` keeps them beside the module.
        record: raise this step's amaxes in the states. False for evaluation, which must not move them.
    """
    return _Linear.apply(x, weight, bias, spec, states or {}, record)  # type: ignore[no-any-return,no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec, states: States, record: bool
    ) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        ctx.spec, ctx.dtype, ctx.shape, ctx.states, ctx.record = spec, dtype, x.shape, states, record
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast(device, enabled=False):
            lhs = operand(rows, spec.output.lhs, dtype, states.get("input"), record)
            rhs = operand(weight, spec.output.rhs, dtype, states.get("weight"), record)
            y = _product(lhs, rhs.t(), bias, dtype)
            # What a backward product takes as the forward did is saved so; what it rounds anew, as it came.
            x_kept = _kept(lhs, rows, _down(spec.grad_weight.rhs), spec.output.lhs, dtype)
            weight_kept = _kept(rhs, weight, _down(spec.grad_input.rhs), spec.output.rhs, dtype)
        ctx.save_for_backward(x_kept.values, x_kept.scale, weight_kept.values, weight_kept.scale)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        spec, dtype, states = ctx.spec, ctx.dtype, ctx.states
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        grad_x = grad_weight = grad_bias = None
        first, second = spec.grad_input, spec.grad_weight
        lhs: Operand | None = None
        with torch.autocast(rows.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                lhs = operand(rows, first.lhs, dtype, states.get("grad_output"), ctx.record)
                anew = _down(first.rhs) != spec.output.rhs
                rhs = operand(weight, _down(first.rhs), dtype) if anew else Operand(weight, weight_scale)
                grad_x = _product(lhs, rhs, None, dtype).view(ctx.shape).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                if lhs is None or _down(second.lhs) != first.lhs:
                    lhs = operand(rows, _down(second.lhs), dtype, states.get("grad_output"), ctx.record)
                anew = _down(second.rhs) != spec.output.lhs
                rhs = operand(x, _down(second.rhs), dtype) if anew else Operand(x, x_scale)
                grad_weight = _product(lhs.t(), rhs, None, dtype).to(ctx.dtypes[1])
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0).to(ctx.dtypes[2])
        return grad_x, grad_weight, grad_bias, None, None, None


def _down(quantizer: Quantizer | None) -> Quantizer | None:
    """The quantizer of an operand whose shared dimension is its first: its tiles run down the columns."""
    return None if quantizer is None else quantizer.down


def _kept(used: Operand, x: Tensor, later: Quantizer | None, now: Quantizer | None, dtype: torch.dtype) -> Operand:
    if later == now:
        return used
    return Operand(x.to(dtype)) if later is None else Operand(x)


def _product(lhs: Operand, rhs: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scaled_mm.supports(lhs, rhs, dtype):
        return scaled_mm.run(lhs, rhs, bias, dtype)
    lhs, rhs = lhs.widened(dtype), rhs.widened(dtype)
    scale = lhs.scale if rhs.scale is None else rhs.scale if lhs.scale is None else lhs.scale * rhs.scale
    return matmul(lhs.values, rhs.values, None if bias is None else bias.to(dtype), scale, dtype)
