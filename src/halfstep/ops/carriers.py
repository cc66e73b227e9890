"""The dtype that holds rounded values exactly, for products on matrix units for it."""

import torch
from torch import Tensor

from halfstep import formats
from halfstep.constant import constant
from halfstep.formats import Format
from halfstep.kernels import carried
from halfstep.quant import TENSOR, Quantizer, Scaling


E4M3_BITS = 4
"""The significant bits of a block's scale, of two levels."""


def tile_carrier(format: Format, rule: Scaling, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`dtype` where it is bf16 and holds elements times their tile's power of two, on matrix units for it; else a
    wider."""
    fits = dtype == torch.bfloat16 and rule.exact and format.significant_bits <= 8
    return dtype if fits and not carried.supports(dtype, device) else torch.promote_types(dtype, torch.float32)


def has_subnormals(carrier: Tensor) -> bool:
    """Whether a CPU's bf16 units would treat some of these bf16 values as zeros."""
    if carrier.device.type != "cpu" or carrier.dtype != torch.bfloat16:
        return False
    magnitude = carrier.abs()
    return bool(((magnitude < torch.finfo(carrier.dtype).smallest_normal) & (magnitude > 0)).any())


@constant
def carrier(key: str, dtype: torch.dtype, scale_bits: int = 0) -> torch.dtype:
    """`dtype` if it holds the values of the format of that key, times scales of so many significant bits, exactly; else
    float32. A traced graph takes it for a constant."""
    if dtype == torch.float64:
        return dtype
    format, info = formats.from_key(key), torch.finfo(dtype)
    bits, room = format.significant_bits + scale_bits, 2.0 ** (15 if scale_bits else 0)
    smallest = info.smallest_normal if dtype == torch.bfloat16 else info.smallest_normal * info.eps
    fits = 2.0 ** (1 - bits) >= info.eps and format.max * room <= info.max and format.smallest / room >= smallest
    return dtype if fits else torch.float32


def operand_dtype(quantizer: Quantizer | None, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that carries one side of a matmul in `dtype`, rounded by that quantizer, where no tensor cores take it
    in 8 bits: int8 for rows of integers, which have a scale each."""
    if quantizer is None:
        return dtype
    quantizer = quantizer.plain
    scales = quantizer.scales
    if scales is None:
        return carrier(quantizer.format.key, dtype)
    if quantizer.inner is not None:
        return operand_dtype(quantizer.inner, dtype, device)
    if quantizer.steps is not None:
        return torch.int8
    if scales.tile == TENSOR and (quantizer.stateful is not None or quantizer.factors):
        return carrier(quantizer.format.key, dtype)
    if scales.rule.two_level:
        return carrier(quantizer.format.key, dtype, E4M3_BITS)
    return tile_carrier(quantizer.format, scales.rule, dtype, device)
