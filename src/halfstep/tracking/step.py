"""Measurements of a training step: rounding errors of operands, lost updates, zeroed values, sharpness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import quant
from halfstep.bits.histogram import ExponentHistogram
from halfstep.bits.what_if import limits_of
from halfstep.errors import QuantizationError
from halfstep.formats import Format
from halfstep.nn.scaling import states_of
from halfstep.ops import amax_of, round_to, values_of
from halfstep.ops.codes import read
from halfstep.ops.part import part_of
from halfstep.optim import LowBit, Update
from halfstep.quant import Quantizer, rotate
from halfstep.quant.quantizer import as_rows
from halfstep.quant.scaling import StatefulScaling
from halfstep.recipe import LinearSpec, Matmul
from halfstep.tracking.nonfinite import take_gradients, tensors_in


@dataclass(frozen=True)
class OperandError:
    """One operand of one matmul, with the error of its last rounding."""

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
    """Relative error, saturated share and flushed share of a matrix (rows, columns) rounded by `quantizer`; after its
    clamp, with the clamped remainder added back if the quantizer compensates it.

    Uses the reference, in float32, and changes no state.
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
    """The saturated share, and the share of non-zero elements that rounding to nearest makes zero."""
    magnitudes, limits = (
        _scaled(as_rows(x.detach()).float(), quantizer, state)[2].abs(),
        limits_of(quantizer.format, False),
    )
    count, nonzero = max(magnitudes.numel(), 1), int(torch.count_nonzero(magnitudes))
    zeroed = limits.zeroed(magnitudes, magnitudes.numel() - nonzero)
    return int(torch.count_nonzero(magnitudes > quantizer.format.max)) / count, zeroed / max(nonzero, 1)


def _scaled(wide: Tensor, quantizer: Quantizer, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix after its clamp, the clamped remainder, the scaled matrix before rounding, and the factor that undoes
    the scale."""
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
    """A tensor as a matmul's operand: a matrix, rotated if the matmul is, whose tiles lie along the shared
    dimension."""
    matrix = as_rows(x.detach()).t() if down else as_rows(x.detach())
    return matrix if product.hadamard is None else rotate(matrix, product.hadamard.still.signs(matrix.device))


@contextmanager
def operand_errors(model: nn.Module, enabled: bool = True) -> Iterator[list[OperandError]]:
    """A context in which every quantised linear layer of a model under a recipe adds a row for each operand that it
    rounds.

    Rows of `output` are added in the forward, those of `grad_input` and `grad_weight` in the backward.
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
    """The amaxes of one step, by tensor, in the order of execution."""

    amaxes: dict[str, float] = field(default_factory=dict)
    """The largest magnitude; infinite if there is a NaN."""
    saturated: dict[str, float] = field(default_factory=dict)
    """For tensors that a recipe rounds, the share beyond the format's largest value, after scaling."""
    underflowed: dict[str, float] = field(default_factory=dict)
    """For the same tensors, the share of non-zero values that become zero."""


@contextmanager
def amaxes(model: nn.Module, enabled: bool = True) -> Iterator[Amaxes]:
    """A context in which a forward and its backward record the largest magnitudes of tensors.

    The tensors are, for each layer with parameters and without sublayers: `input of PATH`, its parameters by name
    (`weight of PATH`), and `grad_output of PATH`. A layer that is called more than once keeps its largest; tensors that
    are not floating point, such as tokens, are left out.

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
        take_gradients(output, lambda grad: note("grad_output", grad))

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


@dataclass(frozen=True)
class Arrival:
    """Sums that compare the updates u that an optimizer computed with the changes e of everything stored of the weight.

    For recipes with a master both are the master's. They are sums, so that the sums of layers add up to a model's.
    """

    along: float = 0.0
    """<e, u>"""
    wanted: float = 0.0
    """<u, u>"""
    lost: int = 0
    """Elements with u != 0 that did not change."""
    moved: int = 0
    """Elements with u != 0."""

    @property
    def quality(self) -> float | None:
        """<e, u> / |u|^2: 1 if nothing is lost, 0 if everything stalls; None if all u are 0.

        Source: Yu et al. 2024 (Collage), arXiv 2405.03637: effective descent quality, divided by |u|.
        """
        return self.along / self.wanted if self.wanted else None

    @property
    def lost_share(self) -> float | None:
        """The share of non-zero updates that changed nothing; None if all u are 0."""
        return self.lost / self.moved if self.moved else None

    def __add__(self, other: Arrival) -> Arrival:
        return Arrival(
            self.along + other.along, self.wanted + other.wanted, self.lost + other.lost, self.moved + other.moved
        )


def arrival(update: Update) -> Arrival:
    """The arrival of one parameter's update."""
    wanted, effective = update.wanted.double(), update.effective.double()
    wants = wanted != 0
    return Arrival(
        along=float((effective * wanted).sum()),
        wanted=float((wanted * wanted).sum()),
        lost=int((wants & (effective == 0)).sum()),
        moved=int(wants.sum()),
    )


@dataclass
class Arrivals:
    """The arrivals of one optimizer step, by parameter."""

    layers: dict[str, Arrival] = field(default_factory=dict)

    @property
    def model(self) -> Arrival:
        """All parameters together."""
        return sum(self.layers.values(), Arrival())


@contextmanager
def arrivals(
    optimizer: LowBit, names: Mapping[Any, str], also: Callable[[Update], None] = lambda update: None
) -> Iterator[Arrivals]:
    """A context that collects the arrival of every update that the optimizer takes, under the parameters' names.

    `also` is called with each update.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> from halfstep.optim import convert
    >>> from halfstep.recipe import get_recipe
    >>> optimizer = convert(torch.optim.SGD([weight], lr=0.5), get_recipe("fp32"), {})
    >>> weight.grad = torch.tensor([1.0, 2.0**-30])
    >>> with arrivals(optimizer, {weight: "weight"}) as found:
    ...     _ = optimizer.step()
    >>> found.model.lost_share, round(found.model.quality, 6)
    (0.0, 1.0)
    """
    found = Arrivals()

    def note(update: Update) -> None:
        found.layers[names.get(update.weight, f"parameter {len(found.layers)}")] = arrival(update)
        also(update)

    with optimizer.watched(note):
        yield found


@dataclass(frozen=True)
class Zeros:
    """A number of zeros, and of values."""

    zeros: int = 0
    of: int = 0

    def __add__(self, other: Zeros) -> Zeros:
        return Zeros(self.zeros + other.zeros, self.of + other.of)


def zeros(tensors: Iterable[Tensor]) -> Zeros:
    """The zeros among all values of some tensors."""
    return sum((Zeros(x.numel() - int(torch.count_nonzero(x)), x.numel()) for x in tensors), Zeros())


def vanished_states(optimizer: LowBit, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, dict[str, Zeros]]:
    """By parameter and state, the elements where a state is zero although the gradient it has just received is not.

    A moment that averages gradients, or their squares, is zero there because it left the range of its format (also
    float32's, for gradients below 1e-21 that are squared). Moments of a subspace do not correspond to the gradient's
    elements, and are left out.

    Args:
        gradients: by parameter, masks of the elements whose gradient was not zero in the last step.
    """
    taken = [
        (parameter, optimizer.plan(parameter, group), optimizer.state[parameter], gradients[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in gradients and "step" in optimizer.state.get(parameter, {})
    ]
    return {
        parameter: {
            name: Zeros(int(((read(kind, name, state, plan.shapes[name]) == 0) & mask).sum()), int(mask.sum()))
            for name, kind in plan.kinds.items()
            if plan.rule is optimizer.rule
        }
        for parameter, plan, state, mask in taken
    }


def share_zeroed(tensors: Iterable[Tensor], format: Format) -> float:
    """The share of the non-zero values that rounding to `format` (nearest-even) makes zero, without a scale."""
    zeroed, nonzero, limits = 0, 0, limits_of(format, stored=True)
    for tensor in tensors:
        magnitudes = tensor.detach().float().abs()
        nonzero += int((magnitudes > 0).sum())
        zeroed += limits.zeroed(magnitudes, int((magnitudes == 0).sum()))
    return zeroed / nonzero if nonzero else 0.0


@torch.no_grad()
def share_lost(steps: Iterable[tuple[Tensor, Tensor]], format: Format) -> float:
    """The share of non-zero updates that would leave the weight unchanged if it were stored in `format`.

    `steps` yields (weight before, weight after) in float32. With w the stored weight and u the update, an update is
    lost if round(w + u) = w: it is not zero itself, but less than half the gap at w.
    """
    lost = moved = 0
    for before, after in steps:
        update = after - before
        stored = round_to(before, format)
        changes = update != 0
        lost += int(((round_to(stored + update, format) == stored) & changes).sum())
        moved += int(changes.sum())
    return lost / moved if moved else 0.0


EPSILON = 5e-4
"""Keskar et al.'s smaller box."""


def logit_sharpness(logits: Tensor, targets: Tensor, epsilon: float = EPSILON) -> Tensor:
    """The relative rise of the cross-entropy in a box around the logits, in percent, at each position, (...) float64.

        phi(z) = 100 (max over |d_j| <= epsilon (|z_j| + 1) of f(z + d) - f(z)) / (1 + f(z)),   f(z) = -log softmax(z)_y

    The derivative of f by z_j is p_j - [j = y]: negative at y only, whatever z. So the maximum is at a corner of the
    box, d_y = -epsilon (|z_y| + 1) and the others positive; no optimizer is needed.

    Args:
        logits: (..., classes).
        targets: the correct classes, (...) int64.

    Raises:
        QuantizationError: shapes that do not match; an epsilon that is negative or not finite.

    Source: Keskar et al. 2017, arXiv 1609.04836, for weights; Lee et al. 2024, arXiv 2405.18710, for the logits. The
    latter's epsilon and normalisation were not in the parts that were read.
    """
    if logits.shape[:-1] != targets.shape or not logits.is_floating_point():
        raise QuantizationError(
            f"logits {tuple(logits.shape)} {logits.dtype} with targets {tuple(targets.shape)}; expected floating "
            "logits (..., classes) and a class for each position (...)"
        )
    if not 0 <= epsilon < float("inf"):
        raise QuantizationError(f"epsilon = {epsilon}; expected a number of at least 0, such as {EPSILON}")
    z, y = logits.detach().double().flatten(0, -2), targets.flatten()
    box = epsilon * (z.abs() + 1)
    corner = z + box
    rows = torch.arange(len(y), dtype=torch.int64, device=y.device)
    corner[rows, y] = z[rows, y] - box[rows, y]
    before, after = (nn.functional.cross_entropy(values, y, reduction="none") for values in (z, corner))
    return (100 * (after - before) / (1 + before)).view(targets.shape)
