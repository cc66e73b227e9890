"""The operands of each product while a model trains: what rounding does to them, and their largest magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import quant
from halfstep.bits.histogram import ExponentHistogram
from halfstep.bits.limits import limits_of
from halfstep.nn.scaling import states_of
from halfstep.ops import amax_of, values_of
from halfstep.ops.part import part_of
from halfstep.quant import Quantizer, rotate
from halfstep.quant.quantizer import as_rows
from halfstep.quant.scaling import StatefulScaling
from halfstep.recipe import LinearSpec, Matmul
from halfstep.tracking.nonfinite import tensors_in


@dataclass(frozen=True)
class OperandError:
    """One operand of one product, as it was rounded last."""

    layer: str
    product: str
    """`output`, `grad_input` or `grad_weight`."""
    operand: str
    """`input`, `weight` or `grad_output`."""
    format: str
    relative_error: float
    """|rounded - x| / |x|, Euclidean norms."""
    saturated: float
    """The share of elements beyond the format's largest value, after scaling."""
    flushed: float
    """The share of non-zero elements that became zero."""


def operand_error(x: Tensor, quantizer: Quantizer, state: Tensor | None = None) -> tuple[float, float, float]:
    """Relative error, saturated share and flushed share of a matrix (rows, columns) rounded so; after its clamp, and
    with what that keeps.

    Takes the reference path, in float32, and changes no state.
    """
    whole, format = as_rows(x.detach()).float(), quantizer.format
    wide, beyond, ratio, back = _scaled(whole, quantizer, state)
    rounded = quant.round_to(ratio, format)
    total, nonzero = max(wide.numel(), 1), max(int((wide != 0).sum()), 1)
    norm = float(whole.norm()) or 1.0
    return (
        float((rounded * back + beyond - whole).norm()) / norm,
        int((ratio.abs() > format.max).sum()) / total,
        int(((rounded == 0) & (wide != 0)).sum()) / nonzero,
    )


def saturated_share(x: Tensor, quantizer: Quantizer, state: Tensor | None = None) -> float:
    """The share of elements beyond the format's largest value, after scaling, of a matrix (rows, columns)."""
    return shares(x, quantizer, state)[0]


def shares(x: Tensor, quantizer: Quantizer, state: Tensor | None = None) -> tuple[float, float]:
    """The same, and the share of non-zero elements that rounding to nearest makes zero, found by comparing."""
    magnitudes, limits = (
        _scaled(as_rows(x.detach()).float(), quantizer, state)[2].abs(),
        limits_of(quantizer.format, False),
    )
    count, nonzero = max(magnitudes.numel(), 1), int(torch.count_nonzero(magnitudes))
    zeroed = limits.zeroed(magnitudes, magnitudes.numel() - nonzero)
    return int(torch.count_nonzero(magnitudes > quantizer.format.max)) / count, zeroed / max(nonzero, 1)


def _scaled(wide: Tensor, quantizer: Quantizer, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix after its clamp, what that keeps apart, the matrix as it is rounded, and what that is multiplied by."""
    format, scales = quantizer.format, quantizer.scales
    beyond = torch.zeros((), dtype=torch.float32, device="cpu")
    if quantizer.clamp is not None:
        wide, beyond = quantizer.clamp.parts(wide, quantizer.clamp.bounds(wide))
        beyond = beyond if quantizer.clamp.compensation else torch.zeros((), dtype=torch.float32, device="cpu")
    if scales is None:
        ratio, back = wide, torch.ones((), dtype=torch.float32, device="cpu")
    elif isinstance(scales.rule, StatefulScaling):
        assert state is not None
        factor = scales.rule.in_use(state, amax_of(wide), format)
        ratio, back = wide * factor, factor.reciprocal()
    else:
        tile, rule = scales.tile, scales.rule
        stored, divisor = rule.scale(wide, tile, format)
        divisor = tile.spread(divisor, *wide.shape)
        ratio = wide * divisor if rule.multiplies else wide / torch.where(divisor == 0, 1.0, divisor)
        back = tile.spread(rule.multiplier(stored, format), *wide.shape)
    return wide, beyond, ratio, back


def _multiplied(product: Matmul, x: Tensor, down: bool = False) -> Tensor:
    """A tensor as a product multiplies it: a matrix, rotated, whose tiles lie along the shared dimension."""
    matrix = as_rows(x.detach()).t() if down else as_rows(x.detach())
    return matrix if product.hadamard is None else rotate(matrix, product.hadamard.still.signs(matrix.device))


@contextmanager
def operand_errors(model: nn.Module, enabled: bool = True) -> Iterator[list[OperandError]]:
    """While active, every quantised linear layer of a model under a recipe adds a row for each operand it rounds.

    Rows of `output` come with the forward, those of `grad_input` and `grad_weight` with the backward.
    """
    rows: list[OperandError] = []

    def watch(path: str, module: nn.Module, spec: LinearSpec) -> Any:
        def add(product: str, operand: str, x: Tensor, quantizer: Quantizer | None, down: bool) -> None:
            if quantizer is not None:
                matrix = _multiplied(getattr(spec, product), x, down)
                error = operand_error(matrix, quantizer, states_of(module).get(operand))
                rows.append(OperandError(path, product, operand, quantizer.format.name, *error))

        def after_forward(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x, weight = args[0].detach(), values_of(module.weight)  # type: ignore[arg-type]
            add("output", "input", x, spec.output.lhs, False)
            add("output", "weight", weight, spec.output.rhs, False)

            def after_backward(grad: Tensor) -> None:
                add("grad_input", "grad_output", grad, spec.grad_input.lhs, False)
                add("grad_input", "weight", weight, spec.grad_input.rhs, True)
                add("grad_weight", "grad_output", grad, spec.grad_weight.lhs, True)
                add("grad_weight", "input", x, spec.grad_weight.rhs, True)

            if output.requires_grad:
                output.register_hook(after_backward)

        return module.register_forward_hook(after_forward)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            spec = part_of(module).linear
            if enabled and isinstance(spec, LinearSpec) and spec.rounds and isinstance(module, nn.Linear):
                hooks.enter_context(watch(path, module, spec))
        yield rows


@dataclass
class Amaxes:
    """Of one step, by tensor, in the order of computing."""

    amaxes: dict[str, float] = field(default_factory=dict)
    """The largest magnitude; infinite where there is a NaN."""
    saturated: dict[str, float] = field(default_factory=dict)
    """Of what a recipe rounds, the share beyond the format's largest value, after scaling."""
    underflowed: dict[str, float] = field(default_factory=dict)
    """Of the same, the share of what is not zero that becomes zero."""


@contextmanager
def amaxes(model: nn.Module, enabled: bool = True) -> Iterator[Amaxes]:
    """While active, a forward and its backward write down the largest magnitudes of tensors.

    The tensors are, of each layer with parameters and no layers within: `input of PATH`, its parameters by name
    (`weight of PATH`), and `grad_output of PATH`. A layer that is called more than once keeps its largest; what is not
    floating, such as tokens, is left out.

    >>> import torch
    >>> layer = nn.Sequential(nn.Linear(2, 1, bias=False))
    >>> _ = layer[0].weight.data.fill_(0.5)
    >>> with amaxes(layer) as found:
    ...     layer(torch.tensor([[1.0, -3.0]])).sum().backward()
    >>> found.amaxes
    {'input of 0': 3.0, 'weight of 0': 0.5, 'grad_output of 0': 1.0}
    """
    found = Amaxes()
    layers = [
        (path or "the model", module)
        for path, module in model.named_modules()
        if enabled and not any(module.children()) and any(True for _ in module.parameters(recurse=False))
    ]
    with ExitStack() as hooks:
        for path, module in layers:
            hooks.enter_context(module.register_forward_hook(_watch(found, path, module)))
        yield found


def _watch(found: Amaxes, path: str, module: nn.Module) -> Any:
    """A hook of a layer's forward."""
    rounded: dict[str, tuple[Matmul, Quantizer | None]] = {}
    spec = part_of(module).linear
    if isinstance(spec, LinearSpec) and isinstance(module, nn.Linear):
        output, back = spec.output, spec.grad_input
        rounded = {"input": (output, output.lhs), "weight": (output, output.rhs), "grad_output": (back, back.lhs)}

    def note(operand: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or not tensor.numel():
            return
        name, largest = f"{operand} of {path}", float(amax_of(tensor.detach()))
        largest = math.inf if math.isnan(largest) else largest
        found.amaxes[name] = max(found.amaxes.get(name, 0.0), largest)
        product, quantizer = rounded.get(operand, (None, None))
        if product is not None and quantizer is not None:
            saturated, underflowed = shares(_multiplied(product, tensor), quantizer, states_of(module).get(operand))
            found.saturated[name] = max(found.saturated.get(name, 0.0), saturated)
            found.underflowed[name] = max(found.underflowed.get(name, 0.0), underflowed)

    def after_forward(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in tensors_in(args):
            note("input", tensor)
        for name, parameter in module.named_parameters(recurse=False):
            note(name, values_of(parameter))
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: note("grad_output", grad))  # type: ignore[no-untyped-call]

    return after_forward


_LOWEST, _HIGHEST = -149, 128  # floor(log2 |x|) of float32's values; infinities and NaN are counted apart


def exponents(tensors: Iterable[Tensor]) -> ExponentHistogram:
    """The histogram over all values of some tensors, of any floating dtype."""
    bins = torch.zeros(_HIGHEST - _LOWEST + 1, dtype=torch.int64, device="cpu")
    zeros = nonfinite = 0
    for tensor in tensors:
        flat = tensor.detach().float().reshape(-1)
        stored = flat.view(torch.int32) >> 23 & 255  # of a normal number, its exponent + 127
        found = torch.bincount(stored, minlength=256).cpu()
        bins[-126 - _LOWEST : 128 - _LOWEST] += found[1:255]
        nonfinite += int(found[255])
        if found[0]:
            small = flat[stored == 0]
            subnormal = small[small != 0]
            zeros += len(small) - len(subnormal)
            _, exponent = torch.frexp(subnormal)  # |x| = f * 2^exponent with f in [1/2, 1): the floor is one less
            bins += torch.bincount(exponent.long() - 1 - _LOWEST, minlength=len(bins)).cpu()
    filled = torch.nonzero(bins).reshape(-1).tolist()
    return ExponentHistogram({i + _LOWEST: int(bins[i]) for i in filled}, zeros, nonfinite)
