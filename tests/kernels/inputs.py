"""Inputs and comparisons shared by the tests of kernels."""

import math
from functools import cache

import torch

from halfstep import formats
from halfstep.formats import Float, Integer
from halfstep.kernels.arithmetic import SQUARES
from halfstep.kernels.cpu.compiled import CHUNK
from oracles.numbers import every_16_bit_value


ROUNDINGS = ("nearest_even", "nearest_away", "nearest_up", "toward_zero", "up", "down", "stochastic")
OVERFLOWS = ("saturate", "ieee")
MADE_UP = (
    *("e5m3", "e8m5", "e4m10", "e3m0", "e2m0", "e7m1", "e6m9"),
    Float("finite5", 3, 1, 2, "finite", source="made up"),
    Float("shifted", 5, 2, -20, "fn", source="made up"),
    Float("tiny", 4, 3, 90, "fnuz", source="made up"),
    Integer("lopsided", -128, 127, 3, source="made up"),
    Integer("wide", -1000, 1000, -2, source="made up"),
)


def all_formats():
    """Named formats, exponent and mantissa splits without a name, and made-up ones that no peer has."""
    return [formats.get(name) for name in (*formats.names(), *MADE_UP)]


@cache
def float32_input():
    """Random bit patterns, normal numbers of several magnitudes, and special values: several chunks and a rest."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(2**31), 2**31, (CHUNK,), generator=generator, dtype=torch.int64).to(torch.int32)
    normal = torch.randn(CHUNK // 2, generator=generator)
    specials = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3.4e38])
    return torch.cat([patterns.view(torch.float32), normal, normal * 1e-3, normal * 100, specials])


def edges(format):
    """Values and boundaries of a format with at most 8 bits, each with its float32 neighbours."""
    if format.bits > 8:
        return torch.empty(0)
    points = torch.tensor([*format.boundaries(), *format.values()], dtype=torch.float64).float()
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    return torch.cat([points, torch.nextafter(points, up), torch.nextafter(points, down)])


def inputs(format, dtype):
    """All values of a 16-bit dtype, or float32 numbers and the format's boundaries."""
    if dtype == torch.float32:
        return torch.cat([float32_input(), edges(format)])
    return every_16_bit_value(dtype)


def near_a_tie(places):
    """Numbers whose norm is 1 + 2^-24, halfway between two float32 values, plus up to eight of 2^-27, whose squares are
    lost if they are added to the sum one at a time."""
    numbers = torch.zeros(max(*places, SQUARES - 1) + 1)
    numbers[0], numbers[SQUARES // 2], numbers[SQUARES // 4], numbers[SQUARES // 8] = 1.0, 2.0**-12, 2.0**-12, 2.0**-24
    numbers[list(places)] = 2.0**-27
    return numbers


ORDERS = [
    (range(1, 9), 1.0), (range(1, 17, 2), 1 + 2.0**-23),
    (range(SQUARES, 9 * SQUARES, SQUARES), 1.0), (range(SQUARES, 17 * SQUARES, 2 * SQUARES), 1 + 2.0**-23),
    (range(SQUARES**2, 9 * SQUARES**2, SQUARES**2), 1.0),
    (range(SQUARES**2, SQUARES**2 + 8), 1 + 2.0**-23),
]  # fmt: skip
"""Indices of the eight, and the norm with the summation order of `kernels.arithmetic`: eight in a part that is summed
before it is added are not lost. In one block, in several, and in more blocks than one halving takes."""
