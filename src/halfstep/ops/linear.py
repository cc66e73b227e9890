"""A linear layer as three products of quantised operands; and those of several experts, each for its own rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import ModelError, RecipeError
from halfstep.kernels import scaled_mm
from halfstep.kernels.operator import unseen
from halfstep.ops.casts import operand_dtype
from halfstep.ops.codes import Keeping
from halfstep.ops.few_rows import StoredWeight, from_codes
from halfstep.ops.function import LastInput, Once, cast_once, no_autocast, once, run
from halfstep.ops.linear_passes import Rounded, RoundedSides, RoundedWeight, States, bias_gradient, product_dtype
from halfstep.ops.native import Native, native_layer
from halfstep.ops.operand import Operand, just_in_time, operand, signs_of
from halfstep.ops.parallel import parallel_linear
from halfstep.ops.part import seeds_of
from halfstep.ops.plain import factors_of, matrix, plain, unflatten
from halfstep.ops.sides import NO_UNITS, Side, Units, both_sides, forward_product, product_of, side, units_of
from halfstep.ops.snapshot import values_of
from halfstep.ops.subclasses import arrived, check_plain, foreign
from halfstep.quant import TENSOR, Quantizer
from halfstep.quant.tracing import has_memory
from halfstep.recipe import LinearSpec, Matmul, linear_text


_PLAIN = (Tensor, torch.nn.Parameter)


# ---- one linear layer ------------------------------------------------------------------------------------------------


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
    last: LastInput | None = None,
) -> Tensor:
    """y = x w^T + b, whose forward product and whose two backward products round their operands as `spec` says.

    x is (..., in), weight (out, in), bias (out), y (..., out). Operands are rounded from the dtype they arrive in;
    the products run in autocast's dtype where autocast is on. An empty spec equals `torch.nn.functional.linear`.
    An operand that both of its products round alike, with one scale or square tiles, is rounded once.

    Args:
        weight: an `Operand` or a `StoredWeight` is one that is rounded already, for inference: its layer has no
            gradients. What `rounded_weight` made is rounded already too, and has them.
        states: where the spec has stateful scalings, their states; and the key that noise and signs follow from, in
            the place of torch's default generator. `nn.apply` keeps them beside the module.
        record: raise this step's amaxes in the states. False for evaluation, which must not move them.
        channels: x comes multiplied by it, a power of two a channel (in); what x is rounded to is divided by it, which
            is exact, and the weight is rounded as it is.
        keeping: where the recipe keeps `operands` in few bits: x is kept as its codes, and the weight is rounded again.
        evaluates: the model is in evaluation, whose products of few rows have an order of their own (`ops.few_rows`).
        last: of the model: an input that its last layer rounded alike is taken from there.

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
    if isinstance(weight, (Operand, StoredWeight)):
        return _infer(x, weight, bias, spec.output, states or {}, channels, evaluates)
    once_for_all = None
    if isinstance(weight, RoundedWeight):
        weight, once_for_all = weight
    elif type(weight) not in _PLAIN:
        weight = values_of(weight)
    if spec.rounds:
        if hasattr(weight, "device_mesh"):
            beside = (
                (channels, "scales of channels"),
                (keeping, "operands kept in few bits"),
                (once_for_all, "a weight rounded once"),
            )
            other = next((what for given, what in beside if given is not None), None)
            return parallel_linear(x, weight, bias, spec, states or {}, record, other)
        if type(weight) not in _PLAIN:
            check_plain(weight)
        if type(x) is not Tensor:
            x = arrived(x)
        if keeping is not None:
            held = has_memory(x, or_fake=True)  # a compiler, and torch.func, keep what they will
            keeping = keeping if held and keeping.saved.operands and torch.is_grad_enabled() else None
        alike = keeping is None and spec.rounds_input_alike
        last = last if alike and has_memory(x, or_fake=True) and not x.is_leaf else None
        dtype = product_dtype(x)
        units = units_of(spec, x, weight, dtype) if scaled_mm.is_there(x.device) else NO_UNITS
        if channels is not None:  # whose powers of two no unit multiplies by
            units = Units(there=units.there)
        elif not torch.is_grad_enabled():
            units = Units(units.output, there=units.there)
        if len(units.both) == 3 and keeping is None and x.requires_grad:
            native = native_layer(spec, x, weight, dtype) if weight.requires_grad else None
            if native is not None:
                given = states or {}, record, once_for_all, last
                return run(Native, x, weight, bias, native, *given)[0]  # type: ignore[no-any-return]
        options = spec, states or {}, record, channels, once_for_all, keeping, evaluates, units, dtype, last
        return run(Rounded, x, weight, bias, *options)[0]  # type: ignore[no-any-return]
    if channels is not None:
        x = x * channels.reciprocal().to(x.dtype)
    if foreign(weight) is not None:
        if spec.multiplies:
            raise ModelError(
                f"a weight of {type(weight).__name__}, another library's tensor, in a product with multipliers "
                f"({linear_text(spec)}): its product has no place for them. Scale the model without that library's "
                "weights, or leave this layer unscaled"
            )
        return F.linear(x, weight, bias)  # which its library has a way for
    dtype = product_dtype(x)
    factors = factors_of(spec, x.numel() // max(x.shape[-1], 1), *weight.shape) if spec.multiplies else None
    x = x if last is None else cast_once(x, last)
    with no_autocast(x):
        x, weight = (operand if operand.dtype == dtype else operand.to(dtype) for operand in (x, weight))
        return plain(x, weight, None if bias is None else bias.to(dtype), factors)


def rounded_weight(
    weight: Tensor,
    spec: LinearSpec,
    dtype: torch.dtype,
    states: States | None = None,
    record: bool = False,
    like: Tensor | None = None,
    backward: bool = True,
) -> RoundedWeight:
    """A weight (out, in) for several calls of `linear` whose products run in `dtype`, rounded once for all of them.

    Args:
        like: what its noise follows from beside the states' key: an input of the layer, other in each micro-batch.
        backward: False for calls without a backward pass, for which the forward product's side is enough.
    """
    check_plain(weight)
    seeds, later_seeds = seeds_of(states, weight if like is None else like, spec.output, spec.grad_input)
    state, at = (states or {}).get("weight"), weight.detach()
    units = units_of(spec, weight, weight, dtype) if scaled_mm.is_there(weight.device) else NO_UNITS

    @torch.no_grad()
    def form() -> tuple[Side, Side, tuple[Tensor | None, Tensor | None]]:
        with torch.autocast(weight.device.type, enabled=False), unseen():
            signs = signs_of(spec.output, at, at, seeds.signs)
            later = signs_of(spec.grad_input, at, at, later_seeds.signs)
            first, second = spec.output.rhs, spec.grad_input.rhs
            if "weight" in units.both and first is not None:
                return *both_sides(at, first, dtype, state, record, given=(seeds.rhs, seeds.rhs)), (signs, later)
            output = operand(at, first, dtype, state, record, signs, seed=seeds.rhs)
            if "weight" not in spec.rerounded or not backward:
                return output, output, (signs, later)
            return output, side(at, second, dtype, signs=later, dim=0, seed=later_seeds.rhs), (signs, later)

    return RoundedWeight(weight, RoundedSides(form))


def _infer(
    x: Tensor,
    weight: Operand | StoredWeight,
    bias: Tensor | None,
    product: Matmul,
    states: States,
    channels: Tensor | None,
    evaluates: bool,
) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        raise ModelError(
            "a layer that is quantised for inference has no gradients, and its input requires one: run it under "
            "torch.no_grad(), train the model first and quantise it then, or train adapters beside its codes: "
            "halfstep.quantize_model(model, recipe, adapters=True), for layers that are no convolutions"
        )
    if evaluates and channels is None and isinstance(weight, StoredWeight):
        y = from_codes(x, weight, bias, product)
        if y is not None:
            return y
    dtype, rows = weight.dtype if isinstance(weight, StoredWeight) else product_dtype(x), matrix(x)
    coded = False
    if isinstance(weight, StoredWeight) and channels is None and product.accumulate is None:
        sizes = len(rows), rows.shape[1], weight.shape[0]
        coded = scaled_mm.takes(product.lhs, weight.quantizer, sizes, dtype, x.device, product.multiplier is not None)
    with no_autocast(x):
        state = just_in_time(rows, product.lhs, states.get("input"))
        lhs = side(rows, product.lhs, dtype, state, coded=coded, seed=seeds_of(states, x, product)[0].lhs)
        if channels is not None:
            assert isinstance(lhs, Operand)
            lhs = lhs.over(channels, dtype)
        y = forward_product(lhs, weight, bias, dtype, product, rows.shape[1], evaluates)
    return unflatten(y, x)


# ---- linear layers of several experts --------------------------------------------------------------------------------

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
