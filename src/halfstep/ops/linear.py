"""A linear layer as three products of quantised operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import ModelError, RecipeError
from halfstep.kernels import scaled_mm
from halfstep.kernels.cpu import whole_mm
from halfstep.kernels.cpu.clamp_operators import estimate
from halfstep.ops.casts import decode
from halfstep.ops.few_rows import StoredWeight, few_rows_product, supports
from halfstep.ops.folding import folded, folds, is_sparse, rest_of, restored, sparse_sum
from halfstep.ops.function import no_autocast, run
from halfstep.ops.matmul import matmul
from halfstep.ops.once import Backwards, Once, once
from halfstep.ops.operand import Operand, carrier, factor_in_use, just_in_time, kept, operand, scale_of, signs_of
from halfstep.ops.plain import factors_of, matrix, plain, unflatten
from halfstep.ops.saved import Keeping
from halfstep.ops.snapshot import values_of
from halfstep.ops.subclasses import check_plain, foreign
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, Matmul, Multiplier, linear_text


States = Mapping[str, Tensor]
"""States of stateful scalings, by operand: `input`, `weight`, `grad_output` (see `recipe.LinearSpec.states`)."""


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """A weight, and what it is rounded to in the two products that take it: for layers that call them several times."""

    weight: Tensor
    output: Operand
    grad_input: Operand
    signs: tuple[Tensor | None, Tensor | None] = (None, None)
    """Of the rotations of the two products."""


def linear(
    x: Tensor,
    weight: Tensor | Operand | StoredWeight | RoundedWeight,
    bias: Tensor | None,
    spec: LinearSpec,
    states: States | None = None,
    record: bool = False,
    channels: Tensor | None = None,
    keeping: Keeping | None = None,
    evaluates: bool = False,
) -> Tensor:
    """y = x w^T + b, whose forward product and whose two backward products round their operands as `spec` says.

    x is (..., in), weight (out, in), bias (out), y (..., out). Operands are rounded from the dtype they arrive in;
    the products run in autocast's dtype where autocast is on. An empty spec equals `torch.nn.functional.linear`.
    An operand that both of its products round alike, with one scale or square tiles, is rounded once.

    Args:
        weight: an `Operand` or a `StoredWeight` is one that is rounded already, for inference: its layer has no
            gradients. What `rounded_weight` made is rounded already too, and has them.
        states: where the spec has stateful scalings, their states; `nn.apply` keeps them beside the module.
        record: raise this step's amaxes in the states. False for evaluation, which must not move them.
        channels: x comes multiplied by it, a power of two a channel (in); what x is rounded to is divided by it, which
            is exact, and the weight is rounded as it is.
        keeping: where the recipe keeps `operands` in few bits: x is kept as its codes, and the weight is rounded again.
        evaluates: the model is in evaluation, whose products of few rows have an order of their own (`ops.few_rows`).

    Raises:
        ModelError: the weight is an `Operand` or a `StoredWeight` and x requires a gradient; a weight that is to be
            rounded is a shard, or another library's tensor.
        RecipeError: `channels` beside a Hadamard transform of the forward product, which mixes them.
    """
    if channels is not None and spec.output.hadamard is not None:
        raise RecipeError(
            f"hadamard = {spec.output.hadamard} of a forward product whose input comes multiplied channel by channel "
            "(smooth_glu = 'channel'): it mixes the channels. Rotate the backward products alone, or take "
            "smooth_glu = 'token'"
        )
    if isinstance(weight, Operand | StoredWeight):
        return _infer(x, weight, bias, spec.output, (states or {}).get("input"), channels, evaluates)
    once_for_all = weight if isinstance(weight, RoundedWeight) else None
    weight = weight.weight if isinstance(weight, RoundedWeight) else values_of(weight)
    if spec.rounds:
        check_plain(weight)
        function = _Rounded if torch.compiler.is_compiling() else _Eager
        keeping = keeping if keeping is not None and _keeps(keeping) else None
        options = spec, states or {}, record, channels, once_for_all, keeping, evaluates
        return run(function, x, weight, bias, *options)[0]  # type: ignore[no-any-return]
    if channels is not None:
        x = x * channels.reciprocal().to(x.dtype)
    if not torch.compiler.is_compiling() and foreign(weight) is not None:
        if spec.multiplies:
            raise ModelError(
                f"a weight of {type(weight).__name__}, another library's tensor, in a product with multipliers "
                f"({linear_text(spec)}): its product has no place for them. Scale the model without that library's "
                "weights, or leave this layer unscaled"
            )
        return F.linear(x, weight, bias)  # which its library has a way for
    dtype = product_dtype(x)
    factors = factors_of(spec, x.numel() // max(x.shape[-1], 1), *weight.shape) if spec.multiplies else None
    with no_autocast(x):
        x, weight = (operand if operand.dtype == dtype else operand.to(dtype) for operand in (x, weight))
        return plain(x, weight, None if bias is None else bias.to(dtype), factors)


def rounded_weight(
    weight: Tensor, spec: LinearSpec, dtype: torch.dtype, states: States | None = None, record: bool = False
) -> RoundedWeight:
    """A weight (out, in) for several calls of `linear` whose products run in `dtype`, rounded once for all of them."""
    check_plain(weight)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        signs, later = signs_of(spec.output, weight, weight), signs_of(spec.grad_input, weight, weight)
        output = operand(weight, spec.output.rhs, dtype, (states or {}).get("weight"), record, signs)
        if "weight" not in spec.anew:
            return RoundedWeight(weight, output, output)
        grad_input = operand(weight, _down(spec.grad_input.rhs), dtype, signs=later, dim=0)
        return RoundedWeight(weight, output, grad_input, (signs, later))


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product of x: autocast's where it is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _keeps(keeping: Keeping) -> bool:
    """Whether this call's operands are kept in few bits. A traced graph keeps what its compiler decides, and a
    transform of torch.func what it will."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return keeping.saved.operands and torch.is_grad_enabled()


def _infer(
    x: Tensor,
    weight: Operand | StoredWeight,
    bias: Tensor | None,
    product: Matmul,
    state: Tensor | None,
    channels: Tensor | None,
    evaluates: bool,
) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        raise ModelError(
            "a layer that is quantised for inference has no gradients, and its input requires one: run it under "
            "torch.no_grad(), train the model first and quantise it then, or train adapters beside its codes: "
            "halfstep.quantize_model(model, recipe, adapters=True), for layers that are no convolutions"
        )
    dtype, rows = weight.dtype if isinstance(weight, StoredWeight) else product_dtype(x), matrix(x)
    with no_autocast(x):
        lhs = operand(rows, product.lhs, dtype, just_in_time(rows, product.lhs, state)).over(channels, dtype)
        y = _forward_product(lhs, weight, bias, dtype, product, rows.shape[1], evaluates)
    return unflatten(y, x)


class _Rounded(Once):
    """The layer with rounded operands: y, an anchor, and what the backward takes of the operands.

    The anchor is a zero that depends on whatever y does, so that a second derivative through the gradients, which do
    not say so themselves, finds its way to the error.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: LinearSpec,
        states: States,
        record: bool,
        channels: Tensor | None,
        rounded: RoundedWeight | None,
        keeping: Keeping | None,
        evaluates: bool,
    ) -> tuple[Tensor | None, ...]:
        dtype, rows, codes = product_dtype(x), matrix(x), None
        saved = spec.input_codes if keeping is not None and weight.requires_grad else None
        signs = rounded.signs[0] if rounded is not None else signs_of(spec.output, x, weight)
        with torch.autocast(x.device.type, enabled=False):
            if keeping is not None and saved is not None:
                lhs, codes = keeping.operand(x, rows, saved, dtype, states.get("input"), record)
            else:
                lhs = operand(rows, spec.output.lhs, dtype, states.get("input"), record, signs)
            if rounded is not None:
                rhs = rounded.output
            else:
                rhs = operand(weight, spec.output.rhs, dtype, states.get("weight"), record, signs)
            over = lhs.over(channels, dtype)
            y = _forward_product(over, rhs, bias, dtype, spec.output, rows.shape[1], evaluates)
            # What a backward product takes as the forward did is kept so; what it rounds anew, as it came.
            x_kept = kept(lhs, rows, spec.grad_weight.rhs, "input" in spec.anew, dtype)
            again = rounded is not None or (keeping is not None and _rounds_again(weight, spec))
            weight_kept = (
                (None, None) if again else kept(rhs, weight, spec.grad_input.rhs, "weight" in spec.anew, dtype)
            )
            rests = rest_of(lhs, "input" not in spec.anew), rest_of(rhs, not again and "weight" not in spec.anew)
        kept_all = x_kept[0] if codes is None else codes, x_kept[1], *weight_kept, *rests[0], *rests[1]
        return unflatten(y, x), y.new_zeros(()), *kept_all

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        x, weight, bias, ctx.spec, ctx.states, ctx.record, channels, ctx.rounded, keeping, _ = inputs
        _, anchor, x_kept, x_scale, weight_kept, weight_scale, *rests = output
        ctx.dtype, ctx.shape = product_dtype(x), x.shape
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(*[saved for saved in output[2:] if saved is not None])
        ctx.set_materialize_grads(False)
        x_kept, weight_kept = x if x_kept is None else x_kept, weight if weight_kept is None else weight_kept
        if keeping is not None and not weight.requires_grad:
            x_kept = x_scale = None
        ctx.again = keeping is not None and weight_kept is weight
        estimated = weight if ctx.spec.estimates else None
        ctx.save_for_backward(anchor, x_kept, x_scale, weight_kept, weight_scale, channels, estimated, *rests)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        options = (ctx.needs_input_grad[:3], ctx.spec, ctx.states, ctx.record, ctx.dtype, ctx.shape, ctx.dtypes)
        return *once(_form, grads[0], *ctx.saved_tensors, *options, ctx.rounded, ctx.again), *[None] * 7


class _Eager(Backwards, _Rounded):
    pass


def _form(
    grad: Tensor,
    anchor: Tensor,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    channels: Tensor | None,
    estimated: Tensor | None,
    x_beyond: Tensor | None,
    x_columns: Tensor | None,
    x_starts: Tensor | None,
    weight_beyond: Tensor | None,
    weight_columns: Tensor | None,
    weight_starts: Tensor | None,
    needs: tuple[bool, ...],
    spec: LinearSpec,
    states: States,
    record: bool,
    dtype: torch.dtype,
    shape: torch.Size,
    dtypes: tuple[torch.dtype, ...],
    rounded: RoundedWeight | None,
    again: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, as far as they are needed."""
    rows = matrix(grad)
    grad_x = grad_weight = grad_bias = None
    first, second = spec.grad_input, spec.grad_weight
    lhs: Operand | None = None
    before, after = folds(first), channels is None and folds(second)
    with torch.autocast(rows.device.type, enabled=False):
        if needs[0]:
            signs = rounded.signs[1] if rounded is not None else signs_of(first, rows, weight)
            if not before:
                lhs = operand(rows, first.lhs, dtype, states.get("grad_output"), record, signs)
            if rounded is not None:
                rhs = rounded.grad_input
            elif again or "weight" in spec.anew:
                rhs = operand(weight, _down(first.rhs), dtype, signs=signs, dim=0)
            else:
                rest = restored((weight_beyond, weight_columns, weight_starts), weight.shape[1])
                rhs = Operand(weight, weight_scale, rest)
            if before or lhs is None:
                assert first.lhs is not None
                lhs, rhs = folded(rows, rhs, first.lhs, dtype, states.get("grad_output"), record, down=False)
            grad_x = _product(lhs, rhs, None, dtype, first, rows.shape[1]).view(shape).to(dtypes[0])
            if channels is not None:
                grad_x = grad_x * channels.reciprocal().to(grad_x.dtype)
        if needs[1]:
            assert x is not None
            x = matrix(x)
            signs = signs_of(second, rows, x)
            if not after and (lhs is None or before or "grad_output" in spec.anew):
                lhs = operand(rows, _down(second.lhs), dtype, states.get("grad_output"), record, signs, 0)
            if x.dtype == torch.uint8:
                x = _decoded(x, spec, dtype)
            anew = "input" in spec.anew
            if anew:
                rhs = operand(x, _down(second.rhs), dtype, signs=signs, dim=0)
            else:
                rhs = Operand(x, x_scale, restored((x_beyond, x_columns, x_starts), x.shape[1]))
            rhs = rhs.over(channels, dtype)
            if after or lhs is None:
                assert second.lhs is not None
                lhs, rhs = folded(rows, rhs, second.lhs.down, dtype, states.get("grad_output"), record, down=True)
            grad_weight = _product(lhs.t(), rhs, None, dtype, second, len(rows)).to(dtypes[1])
            if estimated is not None:
                assert spec.output.rhs is not None
                factor = factor_in_use(estimated, spec.output.rhs, states.get("weight"))
                grad_weight = estimate(grad_weight, estimated, spec.output.rhs, factor)
        if needs[2]:
            grad_bias = bias_gradient(rows, second.multiplier).to(dtypes[2])
    return grad_x, grad_weight, grad_bias


def bias_gradient(rows: Tensor, multiplier: Multiplier | None) -> Tensor:
    """The sum of the rows of dy (rows, out): the weight's product with one column of ones, and so its multiplier."""
    if multiplier is None:
        return rows.sum(0)
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.sum(0, dtype=wide).mul_(multiplier.of(rows.shape[1], rows.shape[0], 1))


def _decoded(codes: Tensor, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
    """What the forward multiplied by, from its codes."""
    assert spec.input_codes is not None
    format = spec.input_codes.format
    return decode(codes, format, carrier(format, dtype))


def _rounds_again(weight: Tensor, spec: LinearSpec) -> bool:
    """Whether rounding a weight a second time gives what the first time gave, from memory that is there anyway."""
    quantizer = spec.output.rhs
    if quantizer is None or quantizer.stateful or quantizer.rounding == "stochastic":
        return False
    whole = weight if weight._base is None else weight._base
    return whole.is_leaf and whole.requires_grad


def _down(quantizer: Quantizer | None) -> Quantizer | None:
    """The quantizer of an operand whose shared dimension is its first: its tiles run down the columns."""
    return None if quantizer is None else quantizer.down


def _forward_product(
    lhs: Operand,
    weight: Operand | StoredWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    product: Matmul,
    shared: int,
    evaluates: bool,
) -> Tensor:
    """lhs times the transpose of the weight (out, in)."""
    if evaluates and supports(lhs, weight, product):
        across = weight.shape[0]
        multiplier = None if product.multiplier is None else product.multiplier.of(len(lhs.values), shared, across)
        return few_rows_product(lhs, weight, bias, dtype, multiplier)
    matrix = weight.operand() if isinstance(weight, StoredWeight) else weight
    return _product(lhs, matrix.t(), bias, dtype, product, shared)


def _product(
    lhs: Operand, rhs: Operand, bias: Tensor | None, dtype: torch.dtype, product: Matmul, shared: int
) -> Tensor:
    """lhs times rhs. A rotation fills their `shared` dimension up to whole blocks, no more for a multiplier."""
    multiplier = None
    if product.multiplier is not None:
        multiplier = product.multiplier.of(lhs.values.shape[0], shared, rhs.values.shape[1])
    if product.accumulate is None and scaled_mm.supports(lhs, rhs, dtype):
        return scaled_mm.run(lhs, rhs, bias, dtype, multiplier)
    both = lhs.remainder is not None and rhs.remainder is not None
    if product.accumulate is None and not both and (whole_mm.supports(lhs, rhs) or is_sparse(lhs, rhs)):
        return _with_remainders(lhs, rhs, bias, dtype, multiplier)
    lhs, rhs, bias = lhs.widened(dtype), rhs.widened(dtype), None if bias is None else bias.to(dtype)
    return matmul(lhs.values, rhs.values, bias, scale_of(lhs, rhs), dtype, product.accumulate, multiplier)


def _with_remainders(
    lhs: Operand, rhs: Operand, bias: Tensor | None, dtype: torch.dtype, multiplier: float | None
) -> Tensor:
    """The product of rounded values, in whole numbers where both are such, and of what is sparse beside them."""
    more = sparse_sum(lhs, rhs) if is_sparse(lhs, rhs) else None
    if more is not None and multiplier is not None:
        more = more.mul_(multiplier)
    if whole_mm.supports(lhs, rhs):
        return whole_mm.run(lhs, rhs, bias, dtype, multiplier, more)
    assert more is not None
    lhs, rhs = replace(lhs, remainder=None).widened(dtype), replace(rhs, remainder=None).widened(dtype)
    bias = None if bias is None else bias.to(dtype)
    product = matmul(lhs.values, rhs.values, bias, scale_of(lhs, rhs), dtype, None, multiplier)
    return product.to(more.dtype).add_(more).to(dtype)
