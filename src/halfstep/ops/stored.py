"""Matrices stored in codes, and the operands that products make of them again."""

from dataclasses import replace

import torch
from torch import Tensor

from halfstep.errors import RecipeError
from halfstep.kernels import carried, scaled_mm
from halfstep.kernels.operators import without_tensor_scale
from halfstep.ops.carriers import E4M3_BITS, carrier, has_subnormals, tile_carrier
from halfstep.ops.casts import Quantized, quantize
from halfstep.ops.factors import just_in_time
from halfstep.ops.operand import Operand, is_whole, lies_down, operand, over
from halfstep.quant import TENSOR, Quantizer, Scales, Scaling, get_scaling
from halfstep.quant.memory import has_memory


def stored(x: Tensor, quantizer: Quantizer, state: Tensor | None = None) -> Quantized:
    """The codes and scales of a matrix, from which `decoded` makes what `operand` makes of the matrix itself.

    The factor of a stateful scaling is kept as a scale that does not change; without a state it is just in time.
    """
    if quantizer.clamp is not None:
        raise RecipeError(
            f"a weight rounded with a {quantizer.clamp}, to be stored for inference: what it keeps apart has no place "
            "beside codes. Give the rule's weight no clamp, or keep these layers by module_filter"
        )
    quantizer = quantizer.plain
    if quantizer.stateful is None:
        return _known(quantize(x, replace(quantizer, outliers=None) if is_whole(quantizer) else quantizer))
    rounded = operand(x, quantizer, torch.float32, just_in_time(x, quantizer, state)).widened(torch.float32)
    codes = quantize(rounded.values, Quantizer(quantizer.format)).codes
    assert rounded.scale is not None
    tensors = {"codes": codes, "scale": rounded.scale.view(1, 1)}
    kept = replace(quantizer, scales=Scales(TENSOR, get_scaling("current")))
    return _known(Quantized(kept, tuple(x.shape), x.dtype, tensors))


def _known(made: Quantized) -> Quantized:
    """The same, when all that `decoded` asks of its quantizer is known: a traced graph cannot take a cached property's
    lock."""
    _ = made.quantizer.steps, made.quantizer.inner, made.quantizer.factors
    return made


def decoded(quantized: Quantized, dtype: torch.dtype) -> Operand:
    """A stored matrix as one side of a product whose result comes in `dtype`: `operand` of what was stored, bitwise."""
    quantizer = quantized.quantizer
    format, scales = quantizer.format, quantizer.scales
    if scales is None:
        return Operand(quantized.dequantize(carrier(format.key, dtype)))
    if quantizer.inner is not None:
        return over(decoded(replace(quantized, quantizer=quantizer.inner), dtype), scales.rule.part)
    if quantizer.steps is not None:
        unscaled = Quantized(Quantizer(format), quantized.shape, quantized.dtype, {"codes": quantized.codes})
        whole = unscaled.dequantize(torch.float32).mul_(quantizer.steps).to(torch.int8)
        return Operand(whole, scales.rule.multiplier(quantized.tensors, format).float() / quantizer.steps)
    native = scaled_mm.outer_dtype(quantizer, quantized.codes.device)
    if native is not None:
        scale = scales.rule.multiplier(quantized.tensors, format).float()
        return Operand(quantized.codes.view(native), scale.view(()) if is_whole(quantizer) else scale)
    if is_whole(quantizer):
        unscaled = Quantized(Quantizer(format), quantized.shape, quantized.dtype, {"codes": quantized.codes})
        scale = scales.rule.multiplier(quantized.tensors, format).view(())
        into = carrier(format.key, dtype)
        wide = carried.supports(into, quantized.codes.device)  # the product would widen them
        return Operand(unscaled.dequantize(torch.float32 if wide else into), scale)
    if scales.rule.two_level:
        blocks = _in_rows(replace(quantized, tensors=without_tensor_scale(quantized.tensors)), scales)
        return Operand(blocks.dequantize(carrier(format.key, dtype, E4M3_BITS)), quantized.tensors["tensor_scale"])
    narrow = tile_carrier(format, scales.rule, dtype, quantized.codes.device)
    result = quantized.dequantize(narrow)
    if narrow == dtype and _may_be_subnormal(quantized, scales.rule) and has_subnormals(result):
        result = quantized.dequantize(torch.float32)
    if lies_down(scales.tile):  # as `operand` lays it out: a product's sums depend on that
        result = result.t().contiguous().t()
    return Operand(result)


def _in_rows(quantized: Quantized, scales: Scales) -> Quantized:
    """The same matrix in tiles of one row each, which CPU kernels know: each row has a taller tile's scale, a byte, of
    its own."""
    tile, rows = scales.tile, quantized.matrix_shape[0]
    if tile.rows == 1 or quantized.codes.device.type != "cpu":
        return quantized
    scale = quantized.scale.repeat_interleave(tile.rows or rows, 0)[:rows]
    quantizer = replace(quantized.quantizer, scales=replace(scales, tile=replace(tile, rows=1)))
    return replace(quantized, quantizer=quantizer, tensors=quantized.tensors | {"scale": scale})


def _may_be_subnormal(quantized: Quantized, rule: Scaling) -> bool:
    """Whether the scales, which are fewer than the values, leave that open, on a CPU; a traced graph cannot ask."""
    if not quantized.codes.is_cpu or not has_memory(quantized.codes):
        return False
    format = quantized.quantizer.format
    multiplier = rule.multiplier(quantized.tensors, format)
    return not bool((multiplier * format.smallest >= torch.finfo(torch.bfloat16).smallest_normal).all())
