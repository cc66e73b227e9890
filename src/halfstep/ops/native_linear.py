"""A linear layer whose three products a GPU's tensor cores compute, of operands rounded once for both of theirs.

It is `ops.linear_passes.Rounded` where nothing else is asked of a layer, with all decided once for its sizes: what is
left of a pass are allocations, launches and products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.gpu import layouts
from halfstep.kernels.gpu.blocks import largest_both
from halfstep.kernels.gpu.launch import plain
from halfstep.kernels.unit_kinds import NUMBERS, ROWS_OF_128, TENSORS, Kind, dtype_of, kind_of
from halfstep.kernels.units_mm import Side, units_mm
from halfstep.kernels.watched import unseen
from halfstep.ops.factors import yet_to_form
from halfstep.ops.function import no_autocast
from halfstep.ops.linear_passes import States, bias_gradient
from halfstep.ops.once import Once, once
from halfstep.ops.plain import matrix, unflatten
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec


class Rounding:
    """Rounds matrices of one shape and dtype for the two products that take them: codes and scales as they lie, and
    transposed."""

    def __init__(
        self, quantizer: Quantizer, kind: Kind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        assert quantizer.scales is not None
        self._quantizer, self.kind, self._rule, self._device = quantizer, kind, quantizer.scales.rule, device
        self._dtype, self._shapes = dtype_of(quantizer.format), (shape, shape[::-1])
        grids = [quantizer.scales.tile.grid(*each) for each in self._shapes]
        strides = [(1, down) if kind is ROWS_OF_128 else (across, 1) for down, across in grids]
        self._scales = list(zip(grids, strides, strict=True))
        form = "whole" if kind is TENSORS else "number"
        self._both = layouts.Both(quantizer, shape, dtype, device, form, strides)

    def __call__(self, x: Tensor, state: Tensor | None, record: bool) -> tuple[Side, Side]:
        one, other = (torch.empty(shape, dtype=self._dtype, device=self._device) for shape in self._shapes)
        if self.kind is TENSORS:
            scale = turned_scale = torch.empty((), dtype=torch.float32, device=self._device)
            factor, amax, found = yet_to_form(x, self._quantizer.format, self._rule, state, record)
            self._both(x, (one, scale, None), (other, scale, None), found, None, factor, amax)
        else:
            scale, turned_scale = (
                torch.empty_strided(*laid, dtype=torch.float32, device=self._device) for laid in self._scales
            )
            self._both(x, (one, scale, None), (other, turned_scale, None), *largest_both(x, self._quantizer))
        return Side(one, self.kind, scale), Side(other, self.kind, turned_scale)


class NativeLayer(NamedTuple):
    """What is decided for a layer of one size."""

    input: Rounding
    weight: Rounding
    grad_output: Rounding
    dtype: torch.dtype
    """Of the products."""


def native_layer(spec: LinearSpec, x: Tensor, weight: Tensor, dtype: torch.dtype) -> NativeLayer | None:
    """A layer whose three products, in `dtype`, tensor cores compute of operands that are rounded once for two of them
    (`Units.both`). None where there is no kernel for x or the weight as it lies, or more is asked of the layer than
    rounding to nearest; or sizes or devices do not fit each other, of which the usual path tells."""
    if not (plain(x) and plain(weight)) or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        return None
    rows, sizes = x.numel() // x.shape[-1], tuple(weight.shape)
    key = rows, sizes, x.dtype, weight.dtype, dtype, x.device
    if key not in spec.known:
        spec.known[key] = _decided(spec, rows, sizes, (x.dtype, weight.dtype, dtype), x.device)
    return spec.known[key]  # type: ignore[no-any-return]


def _decided(
    spec: LinearSpec, rows: int, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> NativeLayer | None:
    quantizers = spec.output.lhs, spec.output.rhs, spec.grad_input.lhs
    across, shared = sizes
    shapes = (rows, shared), (across, shared), (rows, across)
    if spec.draws or spec.rotates or spec.multiplies or spec.estimates:
        return None
    made: list[Any] = []
    for quantizer, shape, dtype in zip(quantizers, shapes, dtypes, strict=True):
        assert quantizer is not None
        kind, x = kind_of(quantizer), torch.empty(shape, dtype=dtype, device="meta")
        if quantizer.clamp is not None or kind not in (TENSORS, *NUMBERS):
            return None
        if not layouts.takes(x, quantizer, given=kind is TENSORS):
            return None
        made.append(Rounding(quantizer, kind, shape, dtype, device))
    return NativeLayer(made[0], made[1], made[2], dtypes[-1])


class Native(Once):
    """y, a number that depends on whatever y does (`Rounded`), and what the backward takes."""

    outputs = 2

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, layer: NativeLayer, states: States, record: bool
    ) -> tuple[Tensor, ...]:
        rows = x if x.dim() == 2 else matrix(x)
        with no_autocast(x), unseen():
            lhs, lhs_turned = layer.input(rows, states.get("input"), record)
            rhs, rhs_turned = layer.weight(weight, states.get("weight"), record)
            y = units_mm(lhs, rhs, None if bias is None else bias.to(layer.dtype), layer.dtype)
        y = y if x.dim() == 2 else unflatten(y, x)
        return y, y.new_empty(()), *lhs_turned[::2], *rhs_turned[::2]

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save what the backward takes."""
        x, weight, bias, layer, states, record = inputs
        ctx.set_materialize_grads(False)
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.layer = layer, states, record, x.shape, dtypes
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *once(_form, grads[0], ctx.needs_input_grad[:3], ctx.layer, *ctx.saved_tensors), None, None, None


def _form(grad: Tensor, needs: tuple[bool, ...], given: tuple[Any, ...], _: Tensor, *kept: Tensor) -> Any:
    """The gradients of x, weight and bias, as far as they are needed."""
    layer, states, record, shape, dtypes = given
    rows = (grad if grad.dim() == 2 else matrix(grad)).contiguous().resolve_neg()
    grad_x = grad_weight = grad_bias = None
    with no_autocast(rows):
        if needs[0] or needs[1]:
            lhs, turned = layer.grad_output(rows, states.get("grad_output"), record)
        if needs[0]:
            rhs = Side(kept[2], layer.weight.kind, kept[3])
            grad_x = units_mm(lhs, rhs, None, layer.dtype).view(shape).to(dtypes[0])
        if needs[1]:
            rhs = Side(kept[0], layer.input.kind, kept[1])
            grad_weight = units_mm(turned, rhs, None, layer.dtype).to(dtypes[1])
        if needs[2]:
            grad_bias = bias_gradient(rows, None).to(dtypes[2])
    return grad_x, grad_weight, grad_bias
