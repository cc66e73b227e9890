"""Which of a model's repeated blocks a rule means, by depth: the first ones, the last ones, or both."""

from __future__ import annotations

import re
from fractions import Fraction
from math import floor

from halfstep.errors import RecipeError


_PART = re.compile(r"(first|last) (\d+(?:\.\d+)?)(%?)")


def check_blocks(text: str) -> None:
    """Raise RecipeError unless `chosen` takes the text."""
    parts = [_PART.fullmatch(part.strip()) for part in text.split(",")]
    known = [part for part in parts if part and (part[3] or part[2].isdigit()) and Fraction(part[2]) > 0]
    ends = {part[1] for part in known}
    if len(known) != len(parts) or len(ends) != len(parts) or any(p[3] and Fraction(p[2]) > 100 for p in known):
        raise RecipeError(
            f"blocks = {text!r} of a rule; expected numbers or shares of blocks from an end: 'first 2', 'last 15%', "
            "'first 1, last 2'"
        )


def chosen(text: str, count: int) -> frozenset[int]:
    """The numbers, from 0 on, of the blocks that the text means in a model of so many.

    A share is rounded to the nearest number of blocks, halves up, and is one block at least.

    Raises:
        RecipeError: there are fewer blocks than the text numbers.

    >>> sorted(chosen("first 1, last 15%", 12))
    [0, 10, 11]
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        assert match is not None, text
        size = Fraction(match[2])
        number = max(1, floor(size * count / 100 + Fraction(1, 2))) if match[3] else int(size)
        if number > count:
            raise RecipeError(f"blocks = {text!r} of a rule, and the model has {count} blocks")
        found |= set(range(number) if match[1] == "first" else range(count - number, count))
    return frozenset(found)
