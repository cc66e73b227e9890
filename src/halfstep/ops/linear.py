"""A linear layer as three matmuls with quantized operands, and a grouped linear layer (one matrix an expert)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import ModelError, RecipeError
from halfstep.kernels import scaled_mm
from halfstep.kernels.operator import unseen
from halfstep.ops.casts import operand_dtype
from halfstep.ops.codes import SavedCodes
from halfstep.ops.few_rows import StoredWeight, from_codes
from halfstep.ops.function import LastInput, Once, cast_once, no_autocast, once, run
from halfstep.ops.linear_passes import Rounded, RoundedSides, RoundedWeight, States, bias_gradient, product_dtype
from halfstep.ops.native import Native, native_layer
from halfstep.ops.operand import Operand, operand, signs_of, state_or_current
from halfstep.ops.parallel import parallel_linear
from halfstep.ops.part import seeds_of
from halfstep.ops.plain import factors_of, matrix, plain, unflatten
from halfstep.ops.sides import (
    NO_TENSOR_CORES,
    Side,
    TensorCores,
    both_sides,
    forward_product,
    product_of,
    side,
    tensor_cores_of,
)  # fmt: skip
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
    saved_codes: SavedCodes | None = None,
    evaluates: bool = False,
    last: LastInput | None = None,
) -> Tensor:
    """y = x w^T + b, where the forward matmul and both backward matmuls round their operands as `spec` says.

    x is (..., in), weight (out, in), bias (out), y (..., out). Operands are rounded from the dtype in which they are
    passed; the matmuls run in autocast's dtype if autocast is on. An empty spec equals `torch.nn.functional.linear`.
    An operand that both of its matmuls round alike, with one scale or square tiles, is rounded once.

    Args:
        weight: an `Operand` or a `StoredWeight` is rounded already, for inference: the layer then has no gradients. A
            `RoundedWeight` (of `rounded_weight`) is rounded already too, and has gradients.
        states: the states of the spec's stateful scalings, by operand, and the key from which the seeds of noise and
            signs are hashed, instead of torch's default generator. `nn.apply` keeps them beside the module.
        record: raise the amaxes of this step in the states. False in evaluation, which must not change them.
        channels: powers of two (in), by which x was multiplied channel by channel. The rounded x is divided by them,
            which is exact; the weight is rounded as it is.
        saved_codes: set where the recipe saves `operands` in few bits: the codes of x are saved for backward, and the
            weight is rounded again.
        evaluates: the model is in evaluation mode, where matmuls of few rows sum in an order of their own
            (`ops.few_rows`).
        last: the model's `LastInput`: if the layer before rounded the same x alike, its operand is used again.

    Raises:
        ModelError: the weight is an `Operand` or a `StoredWeight` and x requires a gradient; a weight that is to be
            rounded is a shard, or another library's tensor.
        RecipeError: `channels` together with a Hadamard transform of the forward matmul, which mixes channels.
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
                (saved_codes, "operands kept in few bits"),
                (once_for_all, "a weight rounded once"),
            )
            other = next((what for given, what in beside if given is not None), None)
            return parallel_linear(x, weight, bias, spec, states or {}, record, other)
        if type(weight) not in _PLAIN:
            check_plain(weight)
        if type(x) is not Tensor:
            x = arrived(x)
        if saved_codes is not None:
            held = has_memory(x, or_fake=True)  # torch.compile and torch.func choose the saved tensors themselves
            saved_codes = saved_codes if held and saved_codes.saved.operands and torch.is_grad_enabled() else None
        alike = saved_codes is None and spec.rounds_input_alike
        last = last if alike and has_memory(x, or_fake=True) and not x.is_leaf else None
        dtype = product_dtype(x)
        may_be_native = scaled_mm.may_have_tensor_cores(x.device)
        cores = tensor_cores_of(spec, x, weight, dtype) if may_be_native else NO_TENSOR_CORES
        if channels is not None:  # no tensor core divides by powers of two channel by channel
            cores = TensorCores(in_8_bits=cores.in_8_bits)
        elif not torch.is_grad_enabled():
            cores = TensorCores(cores.output, in_8_bits=cores.in_8_bits)
        if len(cores.both) == 3 and saved_codes is None and x.requires_grad:
            native = native_layer(spec, x, weight, dtype) if weight.requires_grad else None
            if native is not None:
                given = states or {}, record, once_for_all, last
                return run(Native, x, weight, bias, native, *given)[0]  # type: ignore[no-any-return]
        options = spec, states or {}, record, channels, once_for_all, saved_codes, evaluates, cores, dtype, last
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
        return F.linear(x, weight, bias)  # the weight's library overrides it
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
    """A weight (out, in), rounded once for several calls of `linear` whose matmuls run in `dtype`.

    Args:
        like: a tensor hashed into the seed of noise, beside the states' key: an input of the layer, which differs from
            micro-batch to micro-batch. None: the weight itself.
        backward: False for calls without a backward pass: only the operand of the forward matmul is made.
    """
    check_plain(weight)
    seeds, later_seeds = seeds_of(states, weight if like is None else like, spec.output, spec.grad_input)
    state, at = (states or {}).get("weight"), weight.detach()
    may_be_native = scaled_mm.may_have_tensor_cores(weight.device)
    cores = tensor_cores_of(spec, weight, weight, dtype) if may_be_native else NO_TENSOR_CORES

    @torch.no_grad()
    def form() -> tuple[Side, Side, tuple[Tensor | None, Tensor | None]]:
        with torch.autocast(weight.device.type, enabled=False), unseen():
            signs = signs_of(spec.output, at, at, seeds.signs)
            later = signs_of(spec.grad_input, at, at, later_seeds.signs)
            first, second = spec.output.rhs, spec.grad_input.rhs
            if "weight" in cores.both and first is not None:
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
        state = state_or_current(rows, product.lhs, states.get("input"))
        lhs = side(rows, product.lhs, dtype, state, coded=coded, seed=seeds_of(states, x, product)[0].lhs)
        if channels is not None:
            assert isinstance(lhs, Operand)
            lhs = lhs.over(channels, dtype)
        y = forward_product(lhs, weight, bias, dtype, product, rows.shape[1], evaluates)
    return unflatten(y, x)


# ---- linear layers of several experts --------------------------------------------------------------------------------

_GROUPED = "grouped"  # the key in `LinearSpec.known` of the answer of `_rounds_rows_alone`


def supports_grouped(spec: LinearSpec, x: Tensor) -> bool:
    """Whether `grouped_linear` computes this spec for an x like this one; the spec's part is decided once."""
    if not x.is_cpu or not has_memory(x):
        return False
    if _GROUPED not in spec.known:
        spec.known[_GROUPED] = _rounds_rows_alone(spec)
    return spec.known[_GROUPED]  # type: ignore[no-any-return]


def _rounds_rows_alone(spec: LinearSpec) -> bool:
    """Whether each row of x and of the output's gradient is rounded with scales of its own, and the spec has no states,
    noise, rotations, multipliers, accumulators, estimators or clamps."""
    if not spec.rounds or "input" not in spec.rerounded:
        return False
    if spec.states or spec.draws or spec.rotates or spec.multiplies or spec.accumulates or spec.estimates:
        return False
    rows = spec.output.lhs, spec.grad_input.lhs
    alone = all(q is None or q.scales is None or q.scales.tile.rows == 1 for q in rows)
    return alone and all(_is_tiled(quantizer) for quantizer in spec.quantizers)


def _is_tiled(q: Quantizer) -> bool:
    """Whether `ops.operand` of a matrix is values with the scales of their tiles multiplied in, and nothing else."""
    if q.scales is None or q.clamp is not None or q.outliers is not None or q.inner is not None:
        return False
    return not q.by_rows and not q.scales.rule.two_level and q.scales.tile != TENSOR


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int], spec: LinearSpec, evaluates: bool = False
) -> Tensor:
    """`ops.linear` of each expert's rows of x with that expert's matrix, concatenated, (rows, out): equal bit for bit.

    Args:
        x: (rows, in), sorted by expert.
        weight: (experts, out, in).
        bias: (experts, out).
        counts: the number of rows of each expert; may be 0.
        spec: one for which `supports_grouped` is True.
        evaluates: as for `ops.linear`.
    """
    call = _Call(tuple(counts), spec, product_dtype(x), x.dtype, evaluates)
    return _Grouped.apply(x, weight, bias, call)  # type: ignore[no-any-return, no-untyped-call]


class _Call(NamedTuple):
    """The arguments of one call of `grouped_linear` that are no tensors."""

    counts: tuple[int, ...]
    spec: LinearSpec
    dtype: torch.dtype
    """The dtype of the matmuls."""
    arrived: torch.dtype
    """The dtype of x."""
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
            if weight.requires_grad:  # only the weight's gradient reads x
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
    """The gradients of x, weight and bias; None for those that `needs` leaves out.

    Args:
        kept: the rounded weights of the experts that have rows; empty if the backward rounds them again.
    """
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
    """One operand for each expert's rows of x; every tile lies within one row."""
    return _parts(x, quantizer, call.dtype, call.counts)


def _matrices(weight: Tensor, quantizer: Quantizer | None, call: _Call) -> dict[int, Operand]:
    """The operands of the experts' matrices, by expert, for at least the experts that have rows."""
    hit, (experts, out, _) = call.hit, weight.shape
    if 2 * len(hit) >= experts:
        hit = [*range(experts)]  # rounds some matrices in vain, but copies none
    if quantizer is None or quantizer.scales is None or out % quantizer.scales.tile.rows == 0:
        chosen = weight if len(hit) == experts else weight[hit]
        made = _parts(chosen.reshape(-1, chosen.shape[2]), quantizer, call.dtype, [out] * len(hit))
        return dict(zip(hit, made, strict=True))
    return {expert: operand(weight[expert], quantizer, call.dtype) for expert in call.hit}


def _parts(x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype, sizes: Sequence[int]) -> list[Operand]:
    """`ops.operand` of each of the pieces of x that have `sizes` rows; no tile of x crosses a piece's border."""
    made = operand(x, quantizer, dtype).values
    if made.dtype == operand_dtype(quantizer, dtype, x.device):
        return [Operand(part) for part in made.split_with_sizes(sizes)]
    return [
        operand(part, quantizer, dtype) for part in x.split_with_sizes(sizes)
    ]  # x as a whole needed a wider dtype; some pieces alone do not


def _down(x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype) -> Operand:
    """The operand of a matrix whose first dimension is the shared one, which the matmul sums over."""
    return operand(x, None if quantizer is None else quantizer.down, dtype, dim=0)
