"""Codebooks in lanes: the place of a number among a few values, by the cut points between them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from halfstep.formats import Codebook, Format
from halfstep.kernels.cpu.lanes import Lane


@cache
def cut_points(format: Format, with_values: bool) -> Any:
    """A codebook's cut points as float32, toward -inf: y > cut is then what it is for the exact cut. And its values."""
    if not isinstance(format, Codebook):
        return None
    cuts = [np.float32(b) for b in format.boundaries()]
    cuts = [
        np.nextafter(c, np.float32(-np.inf)) if float(c) > b else c
        for c, b in zip(cuts, format.boundaries(), strict=True)
    ]
    return tuple(cuts) + (tuple(np.float32(v) for v in format.values()) if with_values else ())


def searched(y: Lane, cuts: list[Lane], order: list[Lane] | None) -> Lane:
    """How many cuts y is above: the place of its value among the codebook's; `order` has the codes by place."""
    place = (y > cuts[0]).to(32)
    for cut in cuts[1:]:
        place = place + (y > cut).to(32)
    if order is None:
        return place.to(8)
    half = (place > 7).pick(order[1], order[0])
    return ((half >> ((place & 7) << 2)) & 15).to(8)


def looked_up(y: Lane, cuts: list[Lane]) -> Lane:
    """The value on y's side of every cut; `cuts` goes on with the values."""
    count = len(cuts) // 2
    value = cuts[count]
    for cut, above in zip(cuts[:count], cuts[count + 1 :], strict=True):
        value = (y > cut).pick(above, value)
    return value
