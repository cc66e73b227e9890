"""Multiplies a gradient by an estimator's derivative of rounding (`Estimator.derivative`), in one pass."""

from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from halfstep.formats import Float, Format
from halfstep.kernels.cpu import elements
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import Kernel
from halfstep.kernels.cpu.expansion import exp2, log2
from halfstep.kernels.cpu.lanes import INFINITY, MAGNITUDE, bits_of
from halfstep.kernels.cpu.runs import elementwise
from halfstep.quant import Estimator
from halfstep.quant.estimator import SMALLEST


class Grid(NamedTuple):
    """The positions of a float format's values, as float32 bits."""

    lowest: Any
    """The exponent field of the smallest normal value."""
    shift: Any
    """The distance of a gap between values below their binade, as an exponent field."""
    largest: Any


@cache
def scalars(format: Format) -> tuple[np.uint32, ...] | None:
    """The `Grid` of a float format of at most 8 bits with symmetric range; None for others."""
    known = isinstance(format, Float) and format.bits <= 8 and format.min == -format.max
    if not known or elements.scalars(format, "nearest_even", "saturate") is None:
        return None
    assert isinstance(format, Float)
    grid = Grid(format.min_exponent + 127 << 23, format.mantissa_bits << 23, elements.float_bits(format.max))
    return tuple(np.uint32(number) for number in grid)


def run(grad: Tensor, x: Tensor, factor: Tensor, high: int, wide: int, format: Format, estimator: Estimator) -> bool:
    """Multiply `grad` in place by f'(x * factor), with a factor per tile of `high` x `wide`: (tile rows, columns).
    False where no kernel supports it: contiguous CPU matrices, the gradient in float32."""
    if not plain(grad, torch.float32) or not plain(x) or grad.shape != x.shape:
        return False
    if (grid := scalars(format)) is None or factor.dtype != torch.float32:
        return False
    numbers = tuple(np.float32(n) for n in (estimator.exponent, 1 / estimator.k, estimator.largest, SMALLEST))
    factors = array(factor.contiguous(), torch.float32).reshape(factor.shape)
    arrays = array(grad, torch.float32).reshape(grad.shape), array(x).reshape(x.shape), factors
    if wide == 1:
        _columns(x.numel(), *arrays, high, grid, numbers)
    else:
        _tiles(x.numel(), *arrays, high, wide, grid, numbers)
    return True


@elementwise
def _run_of(out, value, factor, grid, numbers):
    g, (exponent, share, cap, smallest) = Grid(*grid), numbers
    scaled = factor.is_nan().pick(factor.constant(0.0), bits_of(value).float() * factor).bits()  # NaN: not finite
    magnitude = scaled & MAGNITUDE
    inside = magnitude.min(g.largest)
    binade = (inside & INFINITY).max(g.lowest)
    gap = (binade - g.shift).float()
    steps = (inside.float() / gap).truncated().value_as_float()
    middle = (steps + 0.5) * gap
    # |x - middle| in half gaps; where the largest value stands alone above the others, its own side is as steep
    away = ((inside.float() - middle).bits() & MAGNITUDE).float() * (gap.constant(2.0) / gap)
    away = (away > 1.0).pick(away.constant(1.0), away)
    away = (away < smallest).pick(smallest, away)
    slope = exp2(log2(away) * exponent) * share
    slope = (slope > cap).pick(cap, slope)
    slope = (magnitude > INFINITY).pick(scaled.float(), slope)
    return out * slope


@Kernel
def _tiles(grad, x, factor, high, wide, grid, numbers):
    for r in numba.prange(x.shape[0]):
        for tile in range(factor.shape[1]):
            a, b = tile * wide, min((tile + 1) * wide, x.shape[1])
            _run_of(grad[r, a:b], x[r, a:b], factor[r // high, tile], grid, numbers)


@Kernel
def _columns(grad, x, factor, high, grid, numbers):
    for r in numba.prange(x.shape[0]):
        _run_of(grad[r], x[r], factor[r // high], grid, numbers)
