"""A loss scale that lives on the gradients' device: moved there by what the step found, read when somebody asks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


NO_GRADIENT = 2.0
"""What a rank without gradients says in the place of `found`; 1 is an overflow, 0 none."""
MANY, STUCK, GRADIENTLESS = 1, 2, 3


class Rule(NamedTuple):
    """How the scale moves."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    dynamic: bool
    min_scale: float
    hysteresis: int
    most_skips: int
    """Of a constant scale, in a row."""
    many_skips: int
    """In a row, of which the host hears."""


class Numbers(NamedTuple):
    """What moves with the steps."""

    scale: float
    growth_tracker: int
    patience: int
    consecutive_skips: int
    skipped_steps: int


class DeviceScale:
    """The numbers of a `DynamicScale` as tensors, and the same way up and down, without a word to the host.

    Every tensor keeps its place in memory, so a CUDA graph that holds a step moves them on with each replay. What ends
    a run (a scale at its floor) is posted to the host's memory, where `posted` looks without waiting: the host hears
    of it an update or so later.
    """

    def __init__(self, numbers: Numbers, device: torch.device) -> None:
        self.scale = torch.full((), numbers.scale, dtype=torch.float32, device=device)
        """S, a float32 scalar."""
        self._counts = torch.zeros(5, dtype=torch.int64, device=device)
        self._box = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        self._names: tuple[str, ...] = ()
        self._flags: Tensor | None = None
        self.put(numbers)

    def put(self, numbers: Numbers) -> None:
        """Set all of them."""
        self.scale.fill_(numbers.scale)
        for place, number in enumerate((*numbers[1:], 0)):
            self._counts[place].fill_(number)

    def numbers(self) -> Numbers:
        """All of them, read: the host waits for the device."""
        counts = self._counts.tolist()
        return Numbers(float(self.scale), *counts[:-1])

    def overflowed(self) -> tuple[str, ...]:
        """The names of the gradients that were not finite in the last skipped step, read."""
        flags = [] if self._flags is None else self._flags.tolist()
        return tuple(name for name, lost in zip(self._names, flags, strict=True) if lost)

    def holds(self, names: tuple[str, ...]) -> bool:
        """Whether the gradients of those names are the ones that it keeps flags of, or it keeps none."""
        return self._flags is None or names == self._names

    def advance(self, rule: Rule, found: Tensor, names: tuple[str, ...], lost: Tensor) -> None:
        """Move on after a step, as `DynamicScale` does.

        Args:
            found: a float32 scalar, above 0 where the step is skipped.
            names, lost: of every gradient, and whether it was not finite.
        """
        over = found > 0
        tracker, patience, consecutive, skipped, said = self._counts.unbind()
        stuck = grows = spent = over.logical_not() & over
        scale = self.scale
        if rule.dynamic:
            wide = self.scale.double()
            lower = (wide * rule.backoff_factor).float()
            higher = (wide * rule.growth_factor).float()
            spent = over & (patience <= 1)
            stuck = spent & (lower < rule.min_scale)
            grows = ~over & (tracker + 1 == rule.growth_interval)
            scale = torch.where(grows & higher.isfinite(), higher, torch.where(spent & ~stuck, lower, scale))
        else:
            stuck = over & (consecutive + 1 >= rule.most_skips)
        many = over & (consecutive + 1 == rule.many_skips)
        say = torch.where(found == NO_GRADIENT, GRADIENTLESS, torch.where(stuck, STUCK, many.long() * MANY))
        counts = (
            torch.where(over | grows, 0, tracker + 1),
            torch.where(grows, rule.hysteresis, patience - (over & ~spent).long() * rule.dynamic),
            torch.where(over, consecutive + 1, 0),
            skipped + over,
            torch.maximum(said, say),
        )
        self._counts.copy_(torch.stack(counts))
        self.scale.copy_(scale)
        if self._flags is None or not self.holds(names):
            self._names, self._flags = names, torch.zeros_like(lost)
        self._flags.copy_(torch.where(over, lost, self._flags))
        self._box.copy_(self._counts[-1:], non_blocking=True)

    def posted(self) -> int:
        """`STUCK`, `GRADIENTLESS` or 0, as far as the host has heard; said once."""
        heard = int(self._box)
        if heard:
            self._box.zero_()
            self._counts[-1].zero_()
        return heard
