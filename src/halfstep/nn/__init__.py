"""How a recipe is applied to a model."""

from halfstep.nn.adapters.gated import measure_smooth_scales, merge_smooth_scales
from halfstep.nn.apply import advance, apply, plan_of, revert
from halfstep.nn.attention import DotProductAttention
from halfstep.nn.following import following
from halfstep.nn.plan import Plan
from halfstep.nn.product import cached_weights
from halfstep.nn.quantized import dequantize_model, quantize_model
from halfstep.nn.unit import UnitReport, unit_scale


__all__ = [
    "DotProductAttention", "Plan", "UnitReport", "advance", "apply", "cached_weights", "dequantize_model",
    "following", "measure_smooth_scales", "merge_smooth_scales", "plan_of", "quantize_model", "revert", "unit_scale",
]  # fmt: skip
