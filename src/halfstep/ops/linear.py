"""A linear layer as three products of quantised operands."""

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import ModelError, RecipeError
from halfstep.kernels import scaled_mm
from halfstep.kernels.watched import unseen
from halfstep.ops.factors import just_in_time
from halfstep.ops.few_rows import StoredWeight, from_codes
from halfstep.ops.function import no_autocast, run
from halfstep.ops.last_input import LastInput, cast_once
from halfstep.ops.linear_passes import Rounded, RoundedSides, RoundedWeight, States, product_dtype
from halfstep.ops.native import Native, native_layer
from halfstep.ops.noise import seeds_of
from halfstep.ops.operand import Operand, operand, signs_of
from halfstep.ops.parallel import parallel_linear
from halfstep.ops.plain import factors_of, matrix, plain, unflatten
from halfstep.ops.product import forward_product
from halfstep.ops.saved import Keeping
from halfstep.ops.sides import NO_UNITS, Side, Units, both_sides, side, units_of
from halfstep.ops.snapshot import values_of
from halfstep.ops.subclasses import arrived, check_plain, foreign
from halfstep.quant.memory import has_memory
from halfstep.recipe import LinearSpec, Matmul, linear_text


_PLAIN = (Tensor, torch.nn.Parameter)


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
        multiplied = product.multiplier is not None
        coded = scaled_mm.takes(product.lhs, weight.quantizer, sizes, dtype, x.device, multiplied)
    with no_autocast(x):
        state = just_in_time(rows, product.lhs, states.get("input"))
        lhs = side(rows, product.lhs, dtype, state, coded=coded, seed=seeds_of(states, x, product)[0].lhs)
        if channels is not None:
            assert isinstance(lhs, Operand)
            lhs = lhs.over(channels, dtype)
        y = forward_product(lhs, weight, bias, dtype, product, rows.shape[1], evaluates)
    return unflatten(y, x)
