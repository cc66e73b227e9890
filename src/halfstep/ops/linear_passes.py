"""The forward and the backward pass of a linear layer whose operands are rounded."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.cpu.clamp_operators import estimate
from halfstep.kernels.operator import unseen
from halfstep.ops.codes import SavedCodes, of_codes
from halfstep.ops.function import LastInput, Once, apart, no_autocast, once
from halfstep.ops.operand import Operand, factor_in_use, kept, operand, signs_of
from halfstep.ops.part import Seeds, seeds_of
from halfstep.ops.plain import matrix, unflatten
from halfstep.ops.sides import (
    Coded,
    Kept,
    Rest,
    Side,
    TensorCores,
    both_sides,
    folded,
    forward_product,
    kept_parts,
    product_of,
    rest_of,
    restored,
    restored_side,
    side,
)  # fmt: skip
from halfstep.quant import Quantizer
from halfstep.quant.rounding import Seed
from halfstep.recipe import LinearSpec, Multiplier


_NO_SEEDS = (Seeds(),)
_NOTHING_LEFT = ((None, None, None), (None, None, None))
States = Mapping[str, Tensor]
"""States of stateful scalings, by operand: `input`, `weight`, `grad_output` (see `recipe.LinearSpec.states`); and,
under "noise", the key from which the seeds of noise and signs are hashed (`ops.part`)."""


class RoundedSides:
    """The two operands of a weight, for the forward matmul and for the input gradient's, shared by several calls.

    They are made when first read: by `form`, or on a GPU by the native layer (`ops.native`)."""

    def __init__(self, form: Callable[[], tuple[Side, Side, tuple[Tensor | None, Tensor | None]]]) -> None:
        self._form = form
        self._native: tuple[Any, Any] | None = None

    @cached_property
    def _formed(self) -> tuple[Side, Side, tuple[Tensor | None, Tensor | None]]:
        return self._form()

    @property
    def output(self) -> Side:
        """The operand of the forward matmul."""
        return self._formed[0]

    @property
    def grad_input(self) -> Side:
        """The operand of the matmul that computes the gradient of the input."""
        return self._formed[1]

    @property
    def signs(self) -> tuple[Tensor | None, Tensor | None]:
        """The signs of the Hadamard transforms of the two matmuls."""
        return self._formed[2]

    def native(self, form: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Both operands for a native layer (`ops.native`), made by `form` at the first call."""
        if self._native is None:
            self._native = form()
        return self._native

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of the operands that have been made so far."""
        for made in (*(self._native or ()), *vars(self).get("_formed", ())[:2]):
            parts = made.made.tensors if isinstance(made, Coded) else vars(made) if isinstance(made, Operand) else made
            parts = parts.values() if isinstance(parts, Mapping) else parts
            yield from (part for part in parts if isinstance(part, Tensor))


class RoundedWeight(NamedTuple):
    """A weight (out, in) that receives gradients, and the operands that it was rounded to."""

    weight: Tensor
    sides: RoundedSides


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matmul with x: autocast's if autocast is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Rounded(Once):
    """The autograd Function of a linear layer with rounded operands: y, an anchor, and the tensors saved for backward.

    The anchor is a scalar of any value that depends on all that y depends on. It is saved, so that the gradients depend
    on it and a second derivative reaches the error of `once`: the saved operands are marked non-differentiable.
    """

    outputs = 2

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: LinearSpec,
        states: States,
        record: bool,
        channels: Tensor | None,
        rounded: RoundedSides | None,
        saved_codes: SavedCodes | None,
        evaluates: bool,
        cores: TensorCores,
        dtype: torch.dtype,
        last: LastInput | None,
    ) -> tuple[Tensor | None, ...]:
        rows, codes = x if x.dim() == 2 else matrix(x), None
        saved = spec.input_codes if saved_codes is not None and weight.requires_grad else None
        (seeds,) = seeds_of(states, x, spec.output) if spec.draws else _NO_SEEDS
        signs = None
        if spec.rotates:
            signs = rounded.signs[0] if rounded is not None else signs_of(spec.output, x, weight, seeds.signs)
        lhs: Side
        rhs: Side
        x_later = weight_later = None
        both = "input" in cores.both and weight.requires_grad
        found = None if last is None else last.find(x, key := (spec, cores, dtype, both))
        with no_autocast(x):
            with unseen():
                if found is not None:
                    lhs, x_later = found
                elif saved_codes is not None and saved is not None:
                    state = states.get("input")
                    lhs, codes = saved_codes.operand(x, rows, saved, dtype, state, record, seeds.lhs, cores.in_8_bits)
                elif both:
                    later = signs_of(spec.grad_weight, x, weight)
                    twice = seeds.lhs, seeds.lhs
                    lhs, x_later = both_sides(rows, spec.output.lhs, dtype, states.get("input"), record, later, twice)
                else:
                    given = spec.output.lhs, dtype, states.get("input"), record, signs, 1
                    lhs = (
                        side(rows, *given, True, seeds.lhs)
                        if cores.output
                        else operand(rows, *given, cores.in_8_bits, seeds.lhs)
                    )
                if last is not None and found is None:
                    last.note(x, key, (lhs, x_later))
                if rounded is not None:
                    rhs = rounded.output
                elif "weight" in cores.both and x.requires_grad:
                    twice, state = (seeds.rhs, seeds.rhs), states.get("weight")
                    rhs, weight_later = both_sides(weight, spec.output.rhs, dtype, state, record, given=twice)
                else:
                    given = spec.output.rhs, dtype, states.get("weight"), record, signs, 1
                    rhs = (
                        side(weight, *given, True, seeds.rhs)
                        if cores.output
                        else operand(weight, *given, cores.in_8_bits, seeds.rhs)
                    )
            over = lhs if channels is None or not isinstance(lhs, Operand) else lhs.over(channels, dtype)
            sizes = spec.output, rows.shape[1]
            y = (
                forward_product(over, rhs, bias, dtype, *sizes, evaluates)
                if evaluates
                else product_of(over, rhs.t(), bias, dtype, *sizes)
            )
            # Save the forward's operand if a backward matmul takes the same one, else the unrounded tensor.
            x_kept = _kept(lhs, x_later, rows, spec.grad_weight.rhs, "input" in spec.rerounded, dtype)
            alone = isinstance(rhs, Coded) and weight_later is None  # codes that no backward matmul takes
            again = rounded is not None or ((alone or saved_codes is not None) and _rounds_again(weight, spec))
            weight_kept: Kept = (None, None, None)
            if not again:
                weight_kept = _kept(rhs, weight_later, weight, spec.grad_input.rhs, "weight" in spec.rerounded, dtype)
            rests: tuple[Rest, Rest] = _NOTHING_LEFT
            if lhs.remainder is not None or rhs.remainder is not None:
                rests = (
                    rest_of(lhs, "input" not in spec.rerounded),
                    rest_of(rhs, not again and "weight" not in spec.rerounded),
                )
        x_kept = x_kept if codes is None else (codes, *x_kept[1:])
        return (
            apart(y if x.dim() == 2 else unflatten(y, x)),
            y.new_empty(()),
            *x_kept,
            *weight_kept,
            *rests[0],
            *rests[1],
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        if aside := [saved for saved in output[2:] if saved is not None]:  # torch 2.11 traces no call without any
            ctx.mark_non_differentiable(*aside)
        Rounded.keep(ctx, inputs, output)

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Save the tensors and options that the backward reads."""
        x, weight, bias, spec, states, record, channels, rounded, saved_codes, _, cores, dtype, _ = inputs
        anchor, kept = output[1], list(output[2:])
        kept[0], kept[3] = x if kept[0] is None else kept[0], weight if kept[3] is None else kept[3]
        again = (saved_codes is not None or cores.output) and kept[3] is weight
        if not weight.requires_grad:  # only the weight's gradient reads x
            kept[:3], kept[6:9] = _NOTHING_LEFT
        if not x.requires_grad:
            kept[3:6], kept[9:] = _NOTHING_LEFT
        ctx.set_materialize_grads(False)
        estimated = weight if spec.estimates else None
        dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.layer = _Layer(spec, states, record, dtype, x.shape, dtypes, rounded, again, cores)
        ctx.save_for_backward(anchor, channels, estimated, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *once(_form, grads[0], ctx.needs_input_grad[:3], ctx.layer, *ctx.saved_tensors), *[None] * 10


class _Layer(NamedTuple):
    """The options that the backward pass needs beside the saved tensors."""

    spec: LinearSpec
    states: States
    record: bool
    dtype: torch.dtype
    """The dtype of the matmuls."""
    shape: torch.Size
    """The shape of x."""
    dtypes: tuple[torch.dtype | None, ...]
    """The dtypes of x, weight and bias."""
    rounded: RoundedSides | None
    again: bool
    """Whether the backward rounds the weight again."""
    cores: TensorCores


def _form(
    grad: Tensor,
    needs: tuple[bool, ...],
    layer: _Layer,
    anchor: Tensor,
    channels: Tensor | None,
    estimated: Tensor | None,
    *kept: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias; None for those that `needs` leaves out.

    Args:
        kept: values or codes with their scales (`sides.Kept`) of x, then of the weight; then the parts of their
            remainders (`sides.Rest`), in the same order.
    """
    spec, states, record, dtype, shape, dtypes, rounded, again, cores = layer
    of_x, of_weight, x_rest, weight_rest = kept[:3], kept[3:6], kept[6:9], kept[9:]
    rows = grad if grad.dim() == 2 else matrix(grad)
    grad_x = grad_weight = grad_bias = None
    first, second = spec.grad_input, spec.grad_weight
    lhs: Side | None = None
    later: Side | None = None
    before, after = first.folds, channels is None and second.folds
    state, (seeds, again_seeds) = states.get("grad_output"), _NO_SEEDS * 2
    if spec.draws:
        seeds, again_seeds = seeds_of(states, grad, first, second)
    with no_autocast(rows):
        if needs[0]:
            weight = of_weight[0]
            assert weight is not None
            signs = None
            if spec.rotates:
                signs = rounded.signs[1] if rounded is not None else signs_of(first, rows, weight, seeds.signs)
            if needs[1] and "grad_output" in cores.both:
                turned, given = signs_of(second, rows, weight, again_seeds.signs), (seeds.lhs, again_seeds.lhs)
                lhs, later = both_sides(rows, first.lhs, dtype, state, record, turned, given)
            elif not before:
                lhs = side(
                    rows, first.lhs, dtype, state, record, signs, 1, cores.grad_input, seeds.lhs, cores.in_8_bits
                )
            rhs = None if rounded is None else rounded.grad_input
            if rhs is None and cores.in_8_bits:
                rhs = restored_side(of_weight, first.rhs, dtype)
            if rhs is None and (again or "weight" in spec.rerounded):
                options = cores.grad_input, seeds.rhs, cores.in_8_bits
                rhs = side(weight, first.rhs, dtype, None, False, signs, 0, *options)
            elif rhs is None:
                rest = None if weight_rest[0] is None else restored(weight_rest, weight.shape[1])
                rhs = Operand(weight, of_weight[1], rest)
            if before or lhs is None:
                assert first.lhs is not None
                assert isinstance(rhs, Operand)
                lhs, rhs = folded(rows, rhs, first.lhs, dtype, state, record, False, seeds.lhs)
            grad_x = product_of(lhs, rhs, None, dtype, first, rows.shape[1]).view(shape).to(dtypes[0])
            if channels is not None:
                grad_x = grad_x * channels.reciprocal().to(grad_x.dtype)
        if needs[1]:
            x = of_x[0]
            assert x is not None
            signs = signs_of(second, rows, x, again_seeds.signs) if spec.rotates else None
            if later is not None:
                lhs = later
            elif not after and (lhs is None or before or "grad_output" in spec.rerounded):
                options = cores.grad_weight, again_seeds.lhs, cores.in_8_bits
                lhs = side(rows, second.lhs, dtype, state, record, signs, 0, *options)
            known = restored_side(of_x, second.rhs, dtype) if cores.in_8_bits else None
            rhs = _input(x, of_x, x_rest, spec, dtype, signs, cores, again_seeds.rhs) if known is None else known
            if channels is not None:
                assert isinstance(rhs, Operand)
                rhs = rhs.over(channels, dtype)
            if after or lhs is None:
                assert second.lhs is not None
                assert isinstance(rhs, Operand)
                lhs, rhs = folded(rows, rhs, second.lhs.down, dtype, state, record, True, again_seeds.lhs)
            grad_weight = product_of(lhs.t(), rhs, None, dtype, second, len(rows)).to(dtypes[1])
            if estimated is not None:
                assert spec.output.rhs is not None
                factor = factor_in_use(estimated, spec.output.rhs, states.get("weight"))
                grad_weight = estimate(grad_weight, estimated, spec.output.rhs, factor)
        if needs[2]:
            grad_bias = bias_gradient(rows, second.multiplier).to(dtypes[2])
    return grad_x, grad_weight, grad_bias


def _input(
    x: Tensor, of_x: tuple[Tensor | None, ...], rest: Rest, spec: LinearSpec, dtype: torch.dtype,
    signs: Tensor | None, cores: TensorCores, seed: Seed | None,
) -> Side:  # fmt: skip
    """The input's operand for the weight gradient's matmul, from what was saved: its codes, rounded values, or x."""
    x = x if x.dim() == 2 else matrix(x)
    if x.dtype == torch.uint8:
        assert spec.input_codes is not None
        x = of_codes(x, spec.input_codes, dtype, cores.in_8_bits)
    if "input" in spec.rerounded:
        return side(x, spec.grad_weight.rhs, dtype, None, False, signs, 0, cores.grad_weight, seed, cores.in_8_bits)
    return Operand(x, of_x[1], None if rest[0] is None else restored(rest, x.shape[1]))


def bias_gradient(rows: Tensor, multiplier: Multiplier | None) -> Tensor:
    """The sum of the rows of dy (rows, out), times the multiplier of the matmul dy^T 1 with one column of ones."""
    if multiplier is None:
        return rows.sum(0)
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.sum(0, dtype=wide).mul_(multiplier.of(rows.shape[1], rows.shape[0], 1))


def _kept(used: Side, second: Side | None, x: Tensor, later: Quantizer | None, again: bool, dtype: torch.dtype) -> Kept:
    """The parts of x to save for its backward matmul: of `second` if it was made, else of the operand `used` in the
    forward, or of x itself where the backward rounds it `again`. None for values that are x: x is saved instead."""
    if second is not None:
        return kept_parts(second)
    if not again and isinstance(used, Operand):
        return None if used.values is x else used.values, used.scale, None
    if again or isinstance(used, Operand):
        return *kept(used if isinstance(used, Operand) else Operand(x), x, later, again, dtype), None
    return *kept(used.operand(), x, later, again, dtype), None


def _rounds_again(weight: Tensor, spec: LinearSpec) -> bool:
    """Whether rounding the weight again in the backward gives the same values, and saving the weight costs no memory,
    since it is a parameter or a view of one."""
    quantizer = spec.output.rhs
    if quantizer is None or quantizer.stateful or quantizer.rounding == "stochastic":
        return False
    whole = weight if weight._base is None else weight._base
    return whole.is_leaf and whole.requires_grad
