"""What a step's products take: multiply-adds by kind and pass, weighed by the speeds of formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.errors import AccountError


PASSES = "forward", "input gradient", "weight gradient"
"""The three products of a layer, or of each of attention's two."""

ATTENTION, FEED_FORWARD, CORE = "attention linears", "feed-forward linears", "attention core"
LAYERS, OTHERS = "other layers", "other products"
HEAD = "head"
"""The kind of work of the layer whose outputs are the logits."""
KINDS = ATTENTION, FEED_FORWARD, LAYERS, CORE, OTHERS, HEAD
"""What products are of, in the order of the report."""

ROTATIONS, REMAINDERS, ESTIMATES = "Hadamard transforms", "clamped remainders", "estimators"
OVERHEADS = ROTATIONS, REMAINDERS, ESTIMATES
"""What a recipe's products have beside them, which training in 16 bits has not."""

SPEEDS = {16: 1.0, 8: 2.0, 4: 4.0}
"""Multiply-adds in the time of one in 16 bits, by the bits of the wider operand: as tensor cores are sold."""

BASE = 16


@dataclass(frozen=True)
class Work:
    """Products of one kind in one pass whose wider operand has so many bits."""

    kind: str
    """One of `KINDS`, or of `OVERHEADS`."""
    step: str
    """One of `PASSES`."""
    bits: int
    multiply_adds: float
    """Of a recipe with stages the mean over a run's steps."""


@dataclass(frozen=True)
class Cost:
    """What a recipe's products take on an architecture, in multiply-adds at 16 bits' speed.

    Nothing here is measured: what rounding costs, memory, communication and the optimizer are left out.
    """

    recipe: str
    speeds: Mapping[int, float]
    works: tuple[Work, ...]

    @property
    def time(self) -> float:
        """Of all products, and of what is beside them."""
        return sum(work.multiply_adds / speed_of(work.bits, self.speeds) for work in self.works)

    @property
    def multiply_adds(self) -> float:
        """Of all products, without what is beside them."""
        return sum(work.multiply_adds for work in self.works if work.kind in KINDS)

    @property
    def base(self) -> float:
        """The time of the same products with operands in 16 bits, and nothing beside them."""
        return self.multiply_adds / speed_of(BASE, self.speeds)

    @property
    def share(self) -> float:
        """Of the time of training in 16 bits."""
        return self.time / self.base

    @property
    def speed_up(self) -> float:
        """Over training in 16 bits."""
        return self.base / self.time

    def without(self, *kinds: str) -> Cost:
        """The same without products of these kinds, as papers count that leave the head out."""
        return Cost(self.recipe, self.speeds, tuple(work for work in self.works if work.kind not in kinds))

    def of(self, step: str) -> Cost:
        """One of `PASSES` alone."""
        return Cost(self.recipe, self.speeds, tuple(work for work in self.works if work.step == step))


def speeds_from(text: str) -> dict[int, float]:
    """Speeds by the bits of operands, of a text such as `fp16=1,fp8=2,fp4=4`.

    Raises:
        AccountError: it is not such a text, a width comes twice, or 16 bits are not among them.

    >>> speeds_from("fp16=1,fp8=2,fp4=4")
    {16: 1.0, 8: 2.0, 4: 4.0}
    """
    speeds: dict[int, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(?:fp|int)?(\d+)\s*=\s*(\d+\.?\d*|\.\d+)\s*", part)
        if found is None or not float(found[2]) > 0:
            raise AccountError(f"speed {part.strip()!r} in {text!r}; expected widths and speeds: fp16=1,fp8=2,fp4=4")
        if int(found[1]) in speeds:
            raise AccountError(f"{text!r} gives two speeds for {found[1]} bits; give each width once")
        speeds[int(found[1])] = float(found[2])
    if BASE not in speeds:
        raise AccountError(f"{text!r} says nothing of 16 bits, which the others are compared with; add fp16=1")
    return speeds


def speed_of(bits: int, speeds: Mapping[int, float]) -> float:
    """The speed of products whose wider operand has so many bits: that of the next width that takes it.

    Raises:
        AccountError: no width takes it.
    """
    widths = [width for width in speeds if width >= bits]
    if not widths:
        raise AccountError(
            f"products of {bits} bits, and speeds up to {max(speeds)} bits are given; add what your device makes of "
            f"them, such as --speeds fp{bits}=0.5,fp16=1,fp8=2,fp4=4"
        )
    return speeds[min(widths)]
