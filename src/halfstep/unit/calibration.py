"""Constraints that tie an operation's factors, `calibrate`, which measures factors, and the variance of attention.

A constraint ties the factors of an operation's output and of its inputs' gradients. An edge of the graph that is no
cut-edge (its removal does not disconnect the graph) needs the same constant forward and backward; otherwise gradients
would not be a multiple of the true ones. Constraints differ in which constant that is.

Source: Blake, Orr and Luschi 2023 (the geometric mean); u-muP, Blake et al. 2025 (the output's).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ModelError, one_of
from halfstep.ops.plain import scale_backward, scale_forward
from halfstep.quant.tracing import has_memory


# ---- constraints -----------------------------------------------------------------------------------------------------

Constraint = Callable[..., tuple[float, ...]]
"""constraint(output, *grad_inputs): the ideal factors to as many tied ones."""


def none(output: float, *grad_inputs: float) -> tuple[float, ...]:
    """No constraint: each factor stays; for operations after the last residual addition, and always for weights.

    >>> none(0.5, 2.0)
    (0.5, 2.0)
    """
    return (output, *grad_inputs)


def geometric_mean(output: float, *grad_inputs: float) -> tuple[float, ...]:
    """The geometric mean of all factors: values and gradients deviate from unit variance by the same ratio.

    >>> geometric_mean(0.5, 2.0)
    (1.0, 1.0)
    """
    factors = (output, *grad_inputs)
    return (math.prod(factors) ** (1 / len(factors)),) * len(factors)


def to_output(output: float, *grad_inputs: float) -> tuple[float, ...]:
    """The output's factor for all: values have unit variance, gradients need not.

    >>> to_output(0.5, 2.0)
    (0.5, 0.5)
    """
    return (output,) * (1 + len(grad_inputs))


def to_grad_input(output: float, *grad_inputs: float) -> tuple[float, ...]:
    """The geometric mean of the gradients' factors for all: a single gradient has unit variance.

    >>> to_grad_input(0.5, 2.0)
    (2.0, 2.0)
    """
    return (math.prod(grad_inputs) ** (1 / max(len(grad_inputs), 1)),) * (1 + len(grad_inputs))


RULES = none, geometric_mean, to_output, to_grad_input
_RULES: dict[str, Constraint] = {rule.__name__: rule for rule in RULES}


def get_constraint(name: str | Constraint | None) -> Constraint:
    """The constraint by name (`none`, `geometric_mean`, `to_output`, `to_grad_input`); None is `none`; a function is
    returned as it is.

    Raises:
        ModelError: an unknown name; the message has the nearest ones.
    """
    if name is None or callable(name):
        return name or none
    return _RULES[one_of("constraint", name, _RULES, ModelError)]


_TIED = (
    "unit.{}: the operand of shape {} is broadcast to {:,.0f} copies, and its gradient, their sum, is {:.3g} "
    "times unit size, since the constraint ties it to the other factors. Give constraint=None where this operand is a "
    "parameter, or shares no input with the other; where both are made of one tensor x, give None and make this one "
    "of unit.scale_backward(x, {:.4g}), so that x's gradient stays the true one times a constant"
)


def tied(
    name: str,
    constraint: str | Constraint | None,
    ideal: tuple[float, float, float],
    operands: tuple[Tensor, Tensor],
    roots: tuple[float, float],
) -> tuple[float, float, float]:
    """The factors of the output and of both gradients under a constraint.

    The gradient of a broadcast operand is a sum over its copies: its ideal factor is smaller by copies^-1/2, and a
    constraint replaces it by the tied one. From four copies on it warns if the gradient is then twice unit size or
    more.

    Args:
        name: the function's name, for the warning.
        ideal: the ideal factors of the output and both gradients.
        roots: copies^-1/2 of each operand.
    """
    output, *grads = get_constraint(constraint)(*ideal)
    for i, (operand, root, wanted, given) in enumerate(zip(operands, roots, ideal[1:], grads, strict=True)):
        if root <= 0.5 and given >= 2 * wanted and operand.requires_grad and has_memory(operand):
            shape, copies = tuple(operand.shape), root**-2
            warnings.warn(_TIED.format(name, shape, copies, given / wanted, ideal[2 - i] / wanted), stacklevel=3)
    return output, grads[0], grads[1]


# ---- factors of an operation -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """An operation's measured factors, with their errors; callable as the scaled operation."""

    op: Callable[..., Tensor]
    output: float
    """The inverse of the standard deviation of the operation's output."""
    grad_inputs: tuple[float | None, ...]
    """The inverse of the root mean square of each input's gradient; None if it has none."""
    errors: tuple[float, ...]
    """The relative standard errors of these factors, from the spread of the runs; infinite for a single run."""

    def __call__(self, *inputs: Any, constraint: str | Constraint | None = "to_output", **options: Any) -> Tensor:
        """The operation with its factors on its output and on its inputs' gradients, tied by the constraint.

        Inputs without a factor and all `options` are passed unchanged.
        """
        if len(inputs) != len(self.grad_inputs):
            raise ModelError(f"{len(inputs)} inputs of an operation that was calibrated with {len(self.grad_inputs)}")
        output, *grads = get_constraint(constraint)(self.output, *(f for f in self.grad_inputs if f is not None))
        factors = iter(grads)
        scaled = [
            x if factor is None else scale_backward(x, next(factors))
            for x, factor in zip(inputs, self.grad_inputs, strict=True)
        ]
        return scale_forward(self.op(*scaled, **options), output)


def calibrate(
    op: Callable[..., Tensor],
    shapes: Sequence[Sequence[int] | Tensor],
    *,
    runs: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Calibration:
    """Measure the factors of `op` on inputs and an output gradient of N(0, 1).

    The returned calibration can be called as the scaled operation:

    >>> square = calibrate(lambda x: x * x, [(64, 64)])
    >>> round(square.output, 1), round(square.grad_inputs[0], 1)
    (0.7, 0.5)
    >>> square(torch.ones(3))
    tensor([0.7022, 0.7022, 0.7022])

    Args:
        op: takes as many tensors as there are shapes, and returns one.
        shapes: for each input its shape, or a tensor (indices, a mask) that is passed unchanged and has no factor.
        runs: the number of runs, each with other random inputs; factors are from the mean square over all runs.
        seed: of the inputs, and of random numbers in `op`; torch's own generator is not changed.

    Raises:
        ModelError: the output is no floating tensor, not finite, or constant; or an input's gradient is zero or
            missing.
    """
    if runs < 1:
        raise ModelError(f"runs = {runs}; expected one or more")
    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.autocast(torch.device(device).type, enabled=False):
        torch.manual_seed(seed)
        squares = torch.stack([_squares(op, shapes, dtype, device) for _ in range(runs)])
    mean = squares.mean(0)
    deviation = squares.std(0) if runs > 1 else torch.full_like(mean, torch.inf)
    numbers = mean.rsqrt().tolist()
    errors = (deviation / mean / 2 / runs**0.5).tolist()
    grads = iter(numbers[1:])
    given = tuple(None if isinstance(shape, Tensor) else next(grads) for shape in shapes)
    return Calibration(op, numbers[0], given, tuple(errors))


def _gradients(output: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of the leaves for an output gradient of N(0, 1); None for leaves that the output does not use."""
    if not leaves or not output.requires_grad:
        return (None,) * len(leaves)
    return torch.autograd.grad(output, leaves, torch.randn_like(output), allow_unused=True)


def _squares(
    op: Callable[..., Tensor], shapes: Sequence[Sequence[int] | Tensor], dtype: torch.dtype, device: str | torch.device
) -> Tensor:
    """The variance of the output and the mean square of each gradient, in float64."""
    inputs = [
        s
        if isinstance(s, Tensor)
        else torch.randn(tuple(s), device=device, dtype=torch.float32).to(dtype).requires_grad_()
        for s in shapes
    ]
    output = op(*inputs)
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise ModelError(f"an operation to be calibrated gave {type(output).__name__}; expected one floating tensor")
    grads = _gradients(output, [x for x, s in zip(inputs, shapes, strict=True) if not isinstance(s, Tensor)])
    none = torch.zeros((), dtype=torch.float64, device="cpu")
    squares = (none if g is None else g.double().square().mean() for g in grads)
    found = torch.stack([output.detach().double().var(correction=0).cpu(), *(square.cpu() for square in squares)])
    if not bool(torch.isfinite(found).all() and (found > 0).all()):
        raise ModelError(
            f"an operation to be calibrated gave an output of variance {found[0]:g} and gradients of mean squares "
            f"{[float(f'{square:g}') for square in found[1:]]}; expected positive, finite numbers: pass inputs that it "
            "does not use, or that have no gradient, as tensors"
        )
    return found


# ---- the variance of attention's output ------------------------------------------------------------------------------


class Attended:
    """Measures the mean square of attention's output for values of unit variance: the mean, over positions, of the sum
    of squares of softmax's weights, on random scores under a mask. Cached for each mask and size."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], float] = {}

    def energy(self, shape: tuple[int, ...], square: float, mask: Tensor | None, causal: bool) -> float:
        """The mean square for scores of shape (..., times, sources) and mean square `square`.

        Positions that attend to nothing are left out.
        """
        times, sources = shape[-2:]
        key = (times, sources, round(square, 6), mask, causal)  # masks are compared by identity
        if key not in self._found:
            self._found[key] = _energy(times, sources, square, mask, causal)
        return self._found[key]


def _energy(times: int, sources: int, square: float, mask: Tensor | None, causal: bool) -> float:
    outer = (1,) if mask is None or mask.dim() < 3 else tuple(mask.shape[:-2])
    draws = max(1, 4096 // max(times * sources, 1))
    generator = torch.Generator().manual_seed(0)
    scores = (
        torch.randn(draws, *outer, times, sources, generator=generator, dtype=torch.float32, device="cpu") * square**0.5
    )
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        allowed = torch.ones(times, sources, dtype=torch.bool, device="cpu").tril() if causal else None
        if mask is not None:
            mask = mask.detach().cpu()
            if mask.dtype == torch.bool:
                allowed = mask if allowed is None else allowed & mask
            else:
                scores = scores + mask.float()
                allowed = (mask > torch.finfo(torch.float16).min).expand_as(scores)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        energy = torch.softmax(scores, dim=-1).square().sum(-1)
        energy = energy[energy.isfinite()]
    return float(energy.double().mean()) if energy.numel() else 1.0
