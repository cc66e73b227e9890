"""How a tensor of one checkpoint follows from its partner in another, and tensors that have none."""

from __future__ import annotations

import math
from dataclasses import dataclass

from halfstep.bits.relation import Relation


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of A and its partner in B: types as stored, shapes, and how one follows from the other."""

    name: str
    name_b: str
    role: str
    stored: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    relation: Relation
    seen: str = ""
    """What was compared: "" for both as they are, "transposed", "reshaped", "rows in another order" (or columns, both,
    or a vector's values), or the "first rows", where B has more or fewer."""
    how: str = "name"
    """By which they were found: name, prefix, or contents."""

    @property
    def numel(self) -> int:
        """A's values."""
        return math.prod(self.shapes[0])


@dataclass(frozen=True)
class Single:
    """A tensor that only one of the checkpoints has."""

    name: str
    role: str
    stored: str
    shape: tuple[int, ...]
