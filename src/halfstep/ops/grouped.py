"""Linear layers of several experts, each for its own rows: operands rounded for all experts at once, on a CPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.watched import unseen
from halfstep.ops.carriers import operand_dtype
from halfstep.ops.function import no_autocast
from halfstep.ops.linear_passes import bias_gradient, product_dtype
from halfstep.ops.once import Once, once
from halfstep.ops.operand import Operand, operand
from halfstep.ops.product import forward_product, product_of
from halfstep.quant import TENSOR, Quantizer
from halfstep.quant.memory import has_memory
from halfstep.recipe import LinearSpec


_GROUPED = "grouped"  # where a spec keeps whether it is


def supports_grouped(spec: LinearSpec, x: Tensor) -> bool:
    """Whether `grouped_linear` takes such rows under the spec, which is decided once."""
    if not x.is_cpu or not has_memory(x):
        return False
    if _GROUPED not in spec.known:
        spec.known[_GROUPED] = _rounds_rows_alone(spec)
    return spec.known[_GROUPED]  # type: ignore[no-any-return]


def _rounds_rows_alone(spec: LinearSpec) -> bool:
    """Whether no scale of the spec, but of its weights, is shared by several rows, and nothing else is asked of them:
    states, noise, rotations, multipliers, accumulators, clamps."""
    if not spec.rounds or "input" not in spec.rerounded:
        return False
    if spec.states or spec.draws or spec.rotates or spec.multiplies or spec.accumulates or spec.estimates:
        return False
    rows = spec.output.lhs, spec.grad_input.lhs
    alone = all(q is None or q.scales is None or q.scales.tile.rows == 1 for q in rows)
    return alone and all(_is_tiled(quantizer) for quantizer in spec.quantizers)


def _is_tiled(q: Quantizer) -> bool:
    """Whether `ops.operand` makes of a matrix nothing but values times the scales of tiles."""
    if q.scales is None or q.clamp is not None or q.outliers is not None or q.inner is not None:
        return False
    return not q.by_rows and not q.scales.rule.two_level and q.scales.tile != TENSOR


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int], spec: LinearSpec, evaluates: bool = False
) -> Tensor:
    """`ops.linear` of each expert's rows of x by its own matrix, one expert's after another's, bit for bit.

    Args:
        x: (rows, in), sorted by expert.
        weight: (experts, out, in).
        bias: (experts, out).
        counts: how many rows each expert has; it may have none.
        spec: one that `supports_grouped` takes.
        evaluates: as `ops.linear`.
    """
    call = _Call(tuple(counts), spec, product_dtype(x), x.dtype, evaluates)
    return _Grouped.apply(x, weight, bias, call)  # type: ignore[no-any-return, no-untyped-call]


class _Call(NamedTuple):
    """What is known of a call beside tensors."""

    counts: tuple[int, ...]
    spec: LinearSpec
    dtype: torch.dtype
    """Of the products."""
    arrived: torch.dtype
    """Of x."""
    evaluates: bool

    @property
    def hit(self) -> list[int]:
        """The experts that have rows."""
        return [expert for expert, count in enumerate(self.counts) if count]


class _Grouped(Once):
    jvp = staticmethod(Once.tangent)  # type: ignore[assignment]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        product, made = call.spec.output, []
        with no_autocast(x):
            with unseen():
                lhs = _rows(x, product.lhs, call)
                rhs = _matrices(weight, product.rhs, call)
            for expert in call.hit:
                own = None if bias is None else bias[expert]
                made.append(
                    forward_product(lhs[expert], rhs[expert], own, call.dtype, product, x.shape[1], call.evaluates)
                )
            later = None
            if weight.requires_grad:  # whose gradient alone takes x
                later = x if call.spec.grad_weight.rhs is not None else x.to(call.dtype)
        kept = [] if "weight" in call.spec.rerounded else [rhs[expert].values for expert in call.hit]
        ctx.call, ctx.bias = call, None if bias is None else bias.dtype
        ctx.save_for_backward(later, weight, *kept)
        return torch.cat(made) if made else x.new_empty(0, weight.shape[1], dtype=call.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *once(_form, grads[0], ctx.needs_input_grad[:3], ctx.call, ctx.bias, *ctx.saved_tensors), None


def _form(
    grad: Tensor,
    needs: tuple[bool, ...],
    call: _Call,
    bias: torch.dtype | None,
    x: Tensor | None,
    weight: Tensor,
    *kept: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, as far as they are needed. `kept`: the rounded weights of those experts that
    have rows, where they are not rounded again."""
    counts, spec, dtype, arrived, _ = call
    first, second, again = spec.grad_input, spec.grad_weight, "grad_output" in spec.rerounded
    grad_x = grad_weight = grad_bias = None
    rows = grad.split_with_sizes(counts)
    with no_autocast(grad):
        lhs = _rows(grad, first.lhs, call) if needs[0] or not again else ()
        if needs[0]:
            pieces = []
            for place, expert in enumerate(call.hit):
                rhs = Operand(kept[place]) if kept else _down(weight[expert], first.rhs, dtype)
                pieces.append(product_of(lhs[expert], rhs, None, dtype, first, weight.shape[1]))
            grad_x = (
                torch.cat(pieces).to(arrived) if pieces else grad.new_zeros(len(grad), weight.shape[2], dtype=arrived)
            )
        if needs[1]:
            assert x is not None
            grad_weight, inputs = torch.zeros_like(weight), x.split_with_sizes(counts)
            for expert in call.hit:
                left = _down(rows[expert], second.lhs, dtype) if again else lhs[expert]
                right = _down(inputs[expert], second.rhs, dtype)
                grad_weight[expert] = product_of(left.t(), right, None, dtype, second, counts[expert])
        if needs[2]:
            grad_bias = grad.new_zeros(len(counts), grad.shape[1], dtype=bias)
            for expert in call.hit:
                grad_bias[expert] = bias_gradient(rows[expert], None)
    return grad_x, grad_weight, grad_bias


def _rows(x: Tensor, quantizer: Quantizer | None, call: _Call) -> Sequence[Operand]:
    """The operand of each expert's rows of x, whose tiles are pieces of rows."""
    return _parts(x, quantizer, call.dtype, call.counts)


def _matrices(weight: Tensor, quantizer: Quantizer | None, call: _Call) -> dict[int, Operand]:
    """The operands of the matrices of those experts that have rows."""
    hit, (experts, out, _) = call.hit, weight.shape
    if 2 * len(hit) >= experts:
        hit = [*range(experts)]  # some are rounded for nothing, and none is copied
    if quantizer is None or quantizer.scales is None or out % quantizer.scales.tile.rows == 0:
        chosen = weight if len(hit) == experts else weight[hit]
        made = _parts(chosen.reshape(-1, chosen.shape[2]), quantizer, call.dtype, [out] * len(hit))
        return dict(zip(hit, made, strict=True))
    return {expert: operand(weight[expert], quantizer, call.dtype) for expert in call.hit}


def _parts(x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype, sizes: Sequence[int]) -> list[Operand]:
    """What `ops.operand` makes of so many rows of x each, of which none shares a tile with another's."""
    made = operand(x, quantizer, dtype).values
    if made.dtype == operand_dtype(quantizer, dtype, x.device):
        return [Operand(part) for part in made.split_with_sizes(sizes)]
    return [
        operand(part, quantizer, dtype) for part in x.split_with_sizes(sizes)
    ]  # some have no numbers that want a wider dtype


def _down(x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype) -> Operand:
    """The operand of a matrix whose first dimension is the one that the product sums over."""
    return operand(x, None if quantizer is None else quantizer.down, dtype, dim=0)
