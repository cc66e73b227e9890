"""How much of an update arrives: descent quality and lost updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
