"""Matrices of 4 bits with a scale a row, or a column: clamped, scaled and rounded in one pass."""

import torch
from torch import Tensor

from halfstep import formats
from halfstep.kernels.cpu import clamp_operators as operators
from halfstep.ops.casts import seed_of
from halfstep.quant import ROW, Quantizer
from halfstep.quant.memory import has_memory
from halfstep.quant.rounding import Seed


def rounded_rows(
    x: Tensor, quantizer: Quantizer, bounds: Tensor | None, dtype: torch.dtype, given: Seed | None
) -> tuple[Tensor, Tensor | None]:
    """The values of a matrix between its bounds, by a quantizer that goes `by_rows`.

    As whole numbers in int8 and their scales, (rows, 1) or (1, columns); or, where scales are powers of two, multiplied
    by them, in `dtype`, or float32 where some would be subnormal in bfloat16, which CPUs' matrix units take for 0.
    """
    scales, format, held = quantizer.scales, quantizer.format, has_memory(x)
    if not held:
        format = formats.as_constant(format.key)
    assert scales is not None
    amax = operators.amax(x.detach(), bounds, 1 if scales.tile == ROW else 0)
    factor = scales.rule.factor(amax, format)
    assert factor is not None
    steps = quantizer.steps
    if steps is None and dtype == torch.bfloat16 and x.is_cpu and held:
        tiny = bool(((factor > format.smallest * 2.0**126) & (amax > 0)).any())
        dtype = torch.float32 if tiny else dtype
    into = dtype if steps is None else torch.int8
    seed = seed_of(quantizer.rounding, given, x.device)
    made = operators.round_rows(x.detach(), bounds, factor, format, quantizer.rounding, seed, steps, into)
    return made, None if steps is None else factor.reciprocal() / steps
