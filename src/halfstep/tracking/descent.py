"""How much of an update arrives, and where a step's numbers became zero: values, gradients, updates, states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.bits.limits import limits_of
from halfstep.formats import Format
from halfstep.ops import round_to
from halfstep.ops.codes import read
from halfstep.optim import LowBit, Update


@dataclass(frozen=True)
class Arrival:
    """What became of updates u that an optimizer wanted; everything stored of the weight moved by e.

    For recipes with a master both are the master's. They are sums, so that layers add up to a model.
    """

    along: float = 0.0
    """<e, u>"""
    wanted: float = 0.0
    """<u, u>"""
    lost: int = 0
    """Elements with u != 0 that did not move."""
    moved: int = 0
    """Elements with u != 0."""

    @property
    def quality(self) -> float | None:
        """<e, u> / |u|^2: 1 when nothing is lost, 0 when everything stalls; None where nothing was wanted.

        Source: Yu et al. 2024 (Collage), arXiv 2405.03637: effective descent quality, divided by |u|.
        """
        return self.along / self.wanted if self.wanted else None

    @property
    def lost_share(self) -> float | None:
        """The share of wanted updates that moved nothing; None where nothing was wanted."""
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
    """Collect the arrival of every update that the optimizer takes meanwhile, under the parameters' names.

    `also` is called with each update itself.

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
    """How many of some values are zero."""

    zeros: int = 0
    of: int = 0

    def __add__(self, other: Zeros) -> Zeros:
        return Zeros(self.zeros + other.zeros, self.of + other.of)


def zeros(tensors: Iterable[Tensor]) -> Zeros:
    """The zeros among all values of some tensors."""
    return sum((Zeros(x.numel() - int(torch.count_nonzero(x)), x.numel()) for x in tensors), Zeros())


def vanished_states(optimizer: LowBit, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, dict[str, Zeros]]:
    """By parameter and by the name of the state: where a state is zero although the gradient it has just taken is not.

    A moment that averages gradients, or their squares, is zero there because it left the range of its format: float32's
    own too, for gradients below 1e-21 that are squared. Moments of a subspace have no elements of the gradient's, and
    are left out.

    Args:
        gradients: by parameter, masks of the elements whose gradient was not zero in the step that was just taken.
    """
    found: dict[Tensor, dict[str, Zeros]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, taken = optimizer.state.get(parameter, {}), gradients.get(parameter)
            if taken is not None and "step" in state:
                plan = optimizer.plan(parameter, group)
                found[parameter] = {
                    name: Zeros(
                        int(((read(kind, name, state, plan.shapes[name]) == 0) & taken).sum()), int(taken.sum())
                    )
                    for name, kind in plan.kinds.items()
                    if plan.rule is optimizer.rule
                }
    return found


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
    """The share of non-zero updates that leave the weight where it was, were the weight stored in `format`.

    `steps` yields (weight before, weight after) in float32. With w the stored weight and u the update, an update is
    lost when round(w + u) = w: it is not zero itself, but it is less than half the gap at w.
    """
    lost = moved = 0
    for before, after in steps:
        update = after - before
        stored = round_to(before, format)
        changes = update != 0
        lost += int(((round_to(stored + update, format) == stored) & changes).sum())
        moved += int(changes.sum())
    return lost / moved if moved else 0.0
