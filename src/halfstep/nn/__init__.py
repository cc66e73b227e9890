"""How a recipe gets into somebody's model."""

from halfstep.nn.apply import Report, advance, apply, revert
from halfstep.nn.attention import DotProductAttention
from halfstep.nn.dequantized import dequantize_model
from halfstep.nn.following import following
from halfstep.nn.quantized import quantize_model
from halfstep.nn.smooth import measure_smooth_scales, merge_smooth_scales
from halfstep.nn.unit import UnitReport, unit_scale


__all__ = [
    "DotProductAttention", "Report", "UnitReport", "advance", "apply", "dequantize_model", "following",
    "measure_smooth_scales", "merge_smooth_scales", "quantize_model", "revert", "unit_scale",
]  # fmt: skip
