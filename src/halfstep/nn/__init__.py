"""How a recipe gets into somebody's model."""

from halfstep.nn.apply import Report, advance, apply, revert
from halfstep.nn.attention import DotProductAttention
from halfstep.nn.smooth import measure_smooth_scales, merge_smooth_scales


__all__ = [
    "DotProductAttention",
    "Report",
    "advance",
    "apply",
    "measure_smooth_scales",
    "merge_smooth_scales",
    "revert",
]
