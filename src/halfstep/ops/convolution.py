"""Convolutions with quantized operands in the forward and both gradients, or with multipliers; and their `Window`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import ModelError, RecipeError
from halfstep.kernels import carried
from halfstep.kernels.operator import unseen
from halfstep.ops.function import Once, apart, once, run
from halfstep.ops.linear import linear
from halfstep.ops.linear_passes import States, product_dtype
from halfstep.ops.operand import Operand, kept, scale_of, state_or_current
from halfstep.ops.part import seeds_of
from halfstep.ops.places import derivative, filters, places, rounded
from halfstep.ops.plain import Factors
from halfstep.ops.snapshot import values_of
from halfstep.ops.subclasses import check_plain
from halfstep.recipe import LinearSpec, Matmul


# ---- the window ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The stride, padding, dilation and groups of a convolution; the tuples have one entry a spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """Zeros added on both sides."""
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    """The output padding of a transposed convolution."""
    margins: tuple[int, ...] = ()
    """Padding that is applied to the input before all else: the widths of `torch.nn.functional.pad`."""
    mode: str = "constant"
    """The mode of `torch.nn.functional.pad` for `margins`."""

    def widened(self, x: Tensor) -> Tensor:
        """The input padded by `margins`."""
        return F.pad(x, self.margins, self.mode) if any(self.margins) else x

    def is_pointwise(self, sizes: torch.Size) -> bool:
        """Whether each output position depends on the input at the same position alone (1x1, stride 1, no padding), in
        one group, for filters of these sizes."""
        still = all(size == 1 for size in (*sizes, *self.stride)) and not any((*self.padding, *self.output_padding))
        return still and self.groups == 1

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """torch.convolution of x, weight and bias, all of one dtype."""
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, self.transposed, self._beyond(), self.groups
        )

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the input, which has `shape`."""
        return self._backward(grad, grad.new_empty(shape), weight, 0)

    def grad_weight(self, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the weight, which has `shape`."""
        return self._backward(grad, x, grad.new_empty(shape), 1)

    def multiplier(self, product: Matmul, x: torch.Size, weight: torch.Size, of: str = "output") -> float | None:
        """The value of a matmul's multiplier for an input and a weight of these shapes; None if it has none.

        Rows are the positions of all images, columns are channels. The shared size is the number of terms in a sum,
        zeros of the padding included: for an output position in / groups times the window's size, for an input position
        out / groups times the window's size over the strides, for a weight the number of positions.

        Args:
            of: `output`, `grad_input`, `grad_weight` or `grad_bias`.
        """
        if product.multiplier is None:
            return None
        before, beyond = math.prod(x[2:]), math.prod(self._places(x[2:], weight[2:]))
        taps, moved = math.prod(weight[2:]), math.prod(self.stride)
        fan_in, fan_out = float(weight[1] * taps), weight[0] / self.groups * taps / moved
        places, terms, channels = x[0] * beyond, x[0] * beyond, weight[0]
        if self.transposed:
            fan_in, fan_out = fan_out, fan_in
            terms, channels = x[0] * before, weight[1] * self.groups
        sizes = {
            "output": (places, fan_in, fan_out),
            "grad_input": (x[0] * before, fan_out, fan_in),
            "grad_weight": (channels, terms, fan_in),
            "grad_bias": (channels, places, 1),
        }
        return product.multiplier.of(*sizes[of])

    def _places(self, sizes: Sequence[int], filters: Sequence[int]) -> list[int]:
        """The output's size along each spatial dimension."""
        along = list(zip(sizes, filters, self.stride, self.padding, self.dilation, strict=True))
        if self.transposed:
            last = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in along]
            return [n + more for n, more in zip(last, self._beyond(), strict=True)]
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in along]

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        window = (self.stride, self.padding, self.dilation, self.transposed, self._beyond(), self.groups)
        wanted = [which == 0, which == 1, False]
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *window, wanted)[which]  # type: ignore[no-any-return]

    def _beyond(self) -> tuple[int, ...]:
        return self.output_padding or (0,) * len(self.stride)


# ---- convolution with multipliers ------------------------------------------------------------------------------------


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, spec: LinearSpec) -> Tensor:
    """torch's convolution of operands of one dtype, with the multipliers of a spec that rounds nothing.

    The factors multiply the weight and the gradients of weight and bias, which are small compared to inputs and
    outputs. It has derivatives of any order.
    """
    named = {"output": spec.output, "grad_input": spec.grad_input, "grad_weight": spec.grad_weight}
    found = [window.multiplier(product, x.shape, weight.shape, name) for name, product in named.items()]
    found.append(window.multiplier(spec.grad_weight, x.shape, weight.shape, "grad_bias"))
    factors = [1.0 if factor is None else factor for factor in found]
    return run(_Multiplied, x, weight, bias, window, tuple(factors))  # type: ignore[no-any-return]


def bias_gradient(grad: Tensor, factor: float | None) -> Tensor:
    """The sum of the output's gradient (batch, out, *spatial) over all but the channels, times the factor: (out)."""
    others = (0, *range(2, grad.dim()))
    if factor is None:
        return grad.sum(others)
    return grad.sum(others, dtype=torch.promote_types(grad.dtype, torch.float32)) * factor


class _Multiplied(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, factors: Factors) -> Tensor:
        return apart(window.apply(x, weight * factors[0], bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.window, ctx.factors = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), grad, factors = ctx.saved_tensors, grads[0], ctx.factors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.window.grad_input(grad, weight * factors[1], x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.window.grad_weight(grad, x, weight.shape) * factors[2]
        if ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(grad, factors[3])
        return grad_x, grad_weight, grad_bias, None, None

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Tensor:
        (x, weight), (dx, dweight, dbias, *_), window = ctx.saved_tensors, tangents, ctx.window
        terms = [] if dx is None else [window.apply(dx, weight * ctx.factors[0])]
        terms += [] if dweight is None else [window.apply(x, dweight * ctx.factors[0])]
        total: Tensor = sum(terms[1:], terms[0]) if terms else torch.zeros_like(window.apply(x, weight))
        return total if dbias is None else total + dbias.view(-1, *[1] * (x.dim() - 2))


# ---- convolution of rounded operands ---------------------------------------------------------------------------------


def convolution(
    x: Tensor,
    weight: Tensor | Operand,
    bias: Tensor | None,
    window: Window,
    spec: LinearSpec | None = None,
    states: States | None = None,
    record: bool = False,
) -> Tensor:
    """y = conv(x, w) + b, where forward and both gradients round their operands as `spec` says.

    x is (batch, in, *spatial) or (in, *spatial), weight (out, in / groups, *window), for a transposed convolution (in,
    out / groups, *window), bias (out). It runs in autocast's dtype if autocast is on. Without a spec it is torch's
    convolution; where 16-bit GEMMs are emulated, operands and result are rounded once and the rest is float32. A
    pointwise convolution (1x1, stride 1, one group) is `ops.linear` of its channels, bit for bit.

    To define tiles, the operands are seen as matrices, as a linear layer's are, along each matmul's shared dimension:

    - forward: a row of x is the `in` channels at one position, positions in order, image by image; a row of the weight
      is one output channel's filter, position by position of the window, each with its `in` channels.
    - gradient of x: a row of dy is the `out` channels at one position; a row of the weight is one input channel of all
      filters, position by position of the window, each with the `out` channels.
    - gradient of the weight: a row of dy, and of x, is one channel at all positions of the batch.

    A tile of several channels starts again at each position of the window, and is short where the channels end: a block
    of 32 never spans two positions of a window. Each group is tiled by itself (a depthwise convolution has rows of one
    channel), but a scale of the whole tensor covers all groups. Such a scale multiplies the result before its one
    rounding; scales of smaller tiles are multiplied into the values, since a sum over a window mixes them. Zeros of the
    padding are in no tile.

    Args:
        weight: an `Operand` of the weight's shape is rounded already, for inference.
        states, record: as for `ops.linear`.

    Raises:
        ModelError: x has another number of dimensions or channels; or as `ops.linear`.
        RecipeError: a matmul of the spec has an accumulator, or a Hadamard transform and a window of several positions.
    """
    spec = spec or LinearSpec()
    if spec.accumulates:
        raise RecipeError(
            "a convolution with an accumulator other than float32, but torch's convolutions sum in their own way: give "
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
            "a convolution with a Hadamard transform: a window sums over positions that the transform would mix, so it "
            "cannot be undone. Give its rule no `hadamard`"
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
    """The weight of a pointwise convolution as (out, in)."""
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
        state = state_or_current(x, quantizer, states.get("input"))
        lhs = rounded(x, places(window.groups), quantizer, dtype, state, seed=seeds_of(states, x, spec.output)[0].lhs)
        weight = weight.times(window.multiplier(spec.output, x.shape, weight.values.shape), dtype)
        return _product(window.apply, lhs, weight, bias, dtype)


class _Rounded(Once):
    """The autograd Function of a convolution with rounded operands. Outputs as of `ops.linear_passes.Rounded`."""

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
        if not weight.requires_grad:  # only the weight's gradient reads x
            x_kept = x_scale = None
        if not x.requires_grad:
            weight_kept = weight_scale = None
        ctx.save_for_backward(anchor, x_kept, x_scale, weight_kept, weight_scale, weight if spec.estimates else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *once(_form, grads[0], *ctx.saved_tensors, ctx.needs_input_grad[:3], *ctx.layer), None, None, None, None


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
    """The gradients of x, weight and bias; None for those that `needs` leaves out."""
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
    """operation(lhs, rhs) times the operands' scales and the multiplier, plus bias, rounded once as by `ops.matmul`."""
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
