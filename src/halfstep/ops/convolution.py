"""A convolution as three products of quantised operands."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ModelError, RecipeError
from halfstep.kernels import carried
from halfstep.kernels.watched import unseen
from halfstep.ops.factors import just_in_time
from halfstep.ops.function import apart, run
from halfstep.ops.linear import linear
from halfstep.ops.linear_passes import States, product_dtype
from halfstep.ops.noise import seeds_of
from halfstep.ops.once import Once, once
from halfstep.ops.operand import Operand, kept, scale_of
from halfstep.ops.places import derivative, filters, places, rounded
from halfstep.ops.snapshot import values_of
from halfstep.ops.subclasses import check_plain
from halfstep.ops.window import Window, bias_gradient, multiplied
from halfstep.recipe import LinearSpec


def convolution(
    x: Tensor,
    weight: Tensor | Operand,
    bias: Tensor | None,
    window: Window,
    spec: LinearSpec | None = None,
    states: States | None = None,
    record: bool = False,
) -> Tensor:
    """y = conv(x, w) + b, whose forward product and whose two backward products round their operands as `spec` says.

    x is (batch, in, *places) or (in, *places), weight (out, in / groups, *window), of a transposed convolution (in,
    out / groups, *window), bias (out). The products run in autocast's dtype where autocast is on. Without a spec it is
    torch's convolution; where 16-bit products are carried, in float32 between one rounding of its operands and one of
    its result. A convolution of one place (1x1, stride 1, one group) is `ops.linear` of its channels, bit for bit.

    For tiles the operands are matrices as a linear layer's are, along the shared dimension of each product:

    - forward: a row of x is the `in` channels of a place, and places follow each other image by image; a row of the
      weight is an output channel's filter, for each place of the window its `in` channels.
    - gradient of x: a row of dy is the `out` channels of a place; a row of the weight is an input channel's part of all
      filters, for each place of the window the `out` channels.
    - gradient of the weight: a row of dy, and of x, is a channel at all places of the batch.

    A tile of several channels starts again at each place of the window, and is short where the channels end: a block of
    32 never joins two places of a window. Each group is a convolution of its own (a depthwise one has rows of one
    channel), but for a scale of the whole tensor. Such a scale multiplies the product before its one rounding; scales
    of smaller tiles are multiplied into the values, since a sum over a window mixes them. Padded zeros are in no tile.

    Args:
        weight: an `Operand`, of the weight's shape, is one that is rounded already, for inference.
        states, record: as in `ops.linear`.

    Raises:
        ModelError: x has another number of dimensions or channels; as `ops.linear`.
        RecipeError: a product of the spec has an accumulator, or a Hadamard transform where the window has several
            places.
    """
    spec = spec or LinearSpec()
    if spec.accumulates:
        raise RecipeError(
            "a convolution with products that accumulate otherwise than in float32, and its sums are torch's own: give "
            "its rule no `accumulate`"
        )
    values = weight.values if isinstance(weight, Operand) else weight
    channels = values.shape[0] if window.transposed else values.shape[1] * window.groups
    if x.dim() == values.dim() - 1 and x.shape[0] == channels:
        return convolution(x[None], weight, bias, window, spec, states, record).squeeze(0)
    if x.dim() != values.dim() or x.shape[1] != channels:
        raise ModelError(
            f"a convolution of {channels} channels and {values.dim() - 2} dimensions of space found an input of shape "
            f"{tuple(x.shape)}; expected (batch, {channels}{', size' * (values.dim() - 2)}), or the same without batch"
        )
    if window.is_pointwise(values.shape[2:]) and (spec.rounds or spec.multiplies or isinstance(weight, Operand)):
        row, last = _row(weight, window), window.widened(x).movedim(1, -1)
        return linear(last, row, bias, spec, states, record).movedim(-1, 1)
    if spec.rotates:
        raise RecipeError(
            "a convolution with products that a Hadamard transform rotates: a window adds up places that the transform "
            "would mix, so nothing undoes it. Give its rule no `hadamard`"
        )
    if isinstance(weight, Operand):
        return _infer(window.widened(x), weight, bias, window, spec, states or {})
    weight = values_of(weight)
    if spec.rounds:
        check_plain(weight)
        return run(_Rounded, window.widened(x), weight, bias, window, spec, states or {}, record)[0]  # type: ignore[no-any-return]
    dtype = product_dtype(x)
    wide = torch.float32 if carried.supports(dtype, x.device) else dtype
    wide = torch.promote_types(wide, torch.float32) if spec.multiplies else wide
    with torch.autocast(x.device.type, enabled=False):
        x, weight = window.widened(x.to(dtype).to(wide)), weight.to(dtype).to(wide)
        bias = None if bias is None else bias.to(dtype).to(wide)
        return (multiplied(x, weight, bias, window, spec) if spec.multiplies else window.apply(x, weight, bias)).to(
            dtype
        )


def _row(weight: Any, window: Window) -> Any:
    """The weight of a convolution of one place as (out, in)."""
    if isinstance(weight, Operand):
        return Operand(_row(weight.values, window), weight.scale)
    matrix = values_of(weight).flatten(1)
    return matrix.t() if window.transposed else matrix


def _infer(x: Tensor, weight: Operand, bias: Tensor | None, window: Window, spec: LinearSpec, states: States) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        raise ModelError(
            "a layer that is quantised for inference has no gradients, and its input requires one: run it under "
            "torch.no_grad(), or train the model first and quantise it then"
        )
    dtype, quantizer = product_dtype(x), spec.output.lhs
    with torch.autocast(x.device.type, enabled=False):
        state = just_in_time(x, quantizer, states.get("input"))
        lhs = rounded(x, places(window.groups), quantizer, dtype, state, seed=seeds_of(states, x, spec.output)[0].lhs)
        weight = weight.times(window.multiplier(spec.output, x.shape, weight.values.shape), dtype)
        return _product(window.apply, lhs, weight, bias, dtype)


class _Rounded(Once):
    """The convolution with rounded operands: what `ops.linear`'s returns (see there)."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, spec: LinearSpec, states: States, record: bool
    ) -> tuple[Tensor | None, ...]:
        dtype, by_place, by_filter = product_dtype(x), places(window.groups), filters(window.groups, window.transposed)
        with torch.autocast(x.device.type, enabled=False):
            with unseen():
                (seeds,) = seeds_of(states, x, spec.output)
                lhs = rounded(x, by_place, spec.output.lhs, dtype, states.get("input"), record, seeds.lhs)
                rhs = rounded(weight, by_filter, spec.output.rhs, dtype, states.get("weight"), record, seeds.rhs)
            multiplier = window.multiplier(spec.output, x.shape, weight.shape)
            y = _product(window.apply, lhs, rhs.times(multiplier, dtype), bias, dtype)
            x_kept = kept(lhs, x, spec.grad_weight.rhs, "input" in spec.rerounded, dtype)
            weight_kept = kept(rhs, weight, spec.grad_input.rhs, "weight" in spec.rerounded, dtype)
        return apart(y), y.new_zeros(()), *x_kept, *weight_kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        x, weight, bias, window, spec, *more = inputs
        _, anchor, x_kept, x_scale, weight_kept, weight_scale = output
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.layer = window, spec, *more, product_dtype(x), dtypes, (x.shape, weight.shape)
        if aside := [saved for saved in output[2:] if saved is not None]:  # torch 2.11 traces no call without any
            ctx.mark_non_differentiable(*aside)
        ctx.set_materialize_grads(False)
        x_kept, weight_kept = x if x_kept is None else x_kept, weight if weight_kept is None else weight_kept
        if not weight.requires_grad:  # whose gradient alone takes x
            x_kept = x_scale = None
        if not x.requires_grad:
            weight_kept = weight_scale = None
        estimated = weight if spec.estimates else None
        ctx.save_for_backward(anchor, x_kept, x_scale, weight_kept, weight_scale, estimated)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = once(_form, grads[0], *ctx.saved_tensors, ctx.needs_input_grad[:3], *ctx.layer)
        return *found, None, None, None, None


def _form(
    grad: Tensor,
    anchor: Tensor,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor | None,
    weight_scale: Tensor | None,
    estimated: Tensor | None,
    needs: tuple[bool, ...],
    window: Window,
    spec: LinearSpec,
    states: States,
    record: bool,
    dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[torch.Size, torch.Size],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, as far as they are needed."""
    grad_x = grad_weight = grad_bias = None
    first, second = spec.grad_input, spec.grad_weight
    by_place, by_filter = places(window.groups), filters(window.groups, window.transposed)
    state, (seeds, later) = states.get("grad_output"), seeds_of(states, grad, first, second)
    lhs: Operand | None = None
    with torch.autocast(grad.device.type, enabled=False):
        if needs[0]:
            assert weight is not None
            lhs = rounded(grad, by_place, first.lhs, dtype, state, record, seeds.lhs)
            again = "weight" in spec.rerounded
            turned = by_filter.turned
            rhs = rounded(weight, turned, first.rhs, dtype, seed=seeds.rhs) if again else Operand(weight, weight_scale)
            rhs = rhs.times(window.multiplier(first, *shapes, "grad_input"), dtype)
            grad_x = _product(lambda a, b: window.grad_input(a, b, shapes[0]), lhs, rhs, None, dtype).to(dtypes[0])
        if needs[1]:
            assert x is not None
            if lhs is None or "grad_output" in spec.rerounded:
                lhs = rounded(grad, by_place.turned, second.lhs, dtype, state, record, later.lhs)
            again = "input" in spec.rerounded
            rhs = rounded(x, by_place.turned, second.rhs, dtype, seed=later.rhs) if again else Operand(x, x_scale)
            multiplier = window.multiplier(second, *shapes, "grad_weight")
            operation = lambda a, b: window.grad_weight(a, b, shapes[1])  # noqa: E731
            grad_weight = _product(operation, lhs, rhs, None, dtype, multiplier).to(dtypes[1])
            if estimated is not None and spec.output.rhs is not None:
                slope = derivative(estimated, by_filter, spec.output.rhs, states.get("weight"))
                grad_weight = (grad_weight * slope).to(dtypes[1])
        if needs[2]:
            multiplier = window.multiplier(second, *shapes, "grad_bias")
            grad_bias = bias_gradient(grad, multiplier).to(dtypes[2])
    return grad_x, grad_weight, grad_bias


def _product(
    operation: Callable[..., Tensor],
    lhs: Operand,
    rhs: Operand,
    bias: Tensor | None,
    dtype: torch.dtype,
    multiplier: float | None = None,
) -> Tensor:
    """operation(lhs, rhs) times the operands' scales, plus bias, rounded once, as `ops.matmul` forms a product."""
    lhs, rhs = lhs.widened(dtype), rhs.widened(dtype)
    scale: Tensor | float | None = scale_of(lhs, rhs)
    if multiplier is not None:
        scale = multiplier if scale is None else scale * multiplier
    wide = torch.promote_types(lhs.values.dtype, rhs.values.dtype)
    if scale is not None or wide != dtype or carried.supports(wide, lhs.values.device):
        wide = torch.promote_types(wide, torch.float32)
    operands = lhs.values.to(wide), rhs.values.to(wide)
    bias = None if bias is None else bias.to(dtype).to(wide)
    if scale is None:
        return (operation(*operands) if bias is None else operation(*operands, bias)).to(dtype)
    y = operation(*operands) * scale
    return (y if bias is None else y + bias.view(-1, *[1] * (y.dim() - 2))).to(dtype)
