"""What rounding does to each operand of each product, layer by layer, while a model trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import quant
from halfstep.bits.limits import limits_of
from halfstep.nn.scaling import states_of
from halfstep.ops import amax_of, values_of
from halfstep.ops.part import part_of
from halfstep.quant import Quantizer, rotate
from halfstep.quant.quantizer import as_rows
from halfstep.quant.scaling import StatefulScaling
from halfstep.recipe import LinearSpec


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


@contextmanager
def operand_errors(model: nn.Module, enabled: bool = True) -> Iterator[list[OperandError]]:
    """While active, every quantised linear layer of a model under a recipe adds a row for each operand it rounds.

    Rows of `output` come with the forward, those of `grad_input` and `grad_weight` with the backward.
    """
    rows: list[OperandError] = []

    def watch(path: str, module: nn.Module, spec: LinearSpec) -> Any:
        def add(product: str, operand: str, x: Tensor, quantizer: Quantizer | None, down: bool) -> None:
            if quantizer is not None:
                matrix = as_rows(x.detach())  # tiles lie along the product's shared dimension
                matrix = matrix.t() if down else matrix
                if (hadamard := getattr(spec, product).hadamard) is not None:
                    matrix = rotate(matrix, hadamard.still.signs(matrix.device))
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
