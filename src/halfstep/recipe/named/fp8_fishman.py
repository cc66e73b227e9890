"""Smooth-SwiGLU with both of Adam's moments in FP8: Fishman et al. 2025, arXiv 2409.12517."""

from dataclasses import replace

from halfstep import formats
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe.named.fp8_smooth_swiglu import fp8_smooth_swiglu
from halfstep.recipe.storage import Storage, get_storage


def _moment(name: str) -> Storage:
    return get_storage(Quantizer(formats.get(name), scales=Scales(TENSOR, get_scaling("current"))))


fp8_fishman = replace(
    fp8_smooth_swiglu,
    name="fp8-fishman",
    summary="fp8-smooth-swiglu with the first moment in E4M3 (max 240) and the second in E5M2, one scale a tensor.",
    source="Fishman et al. 2025, arXiv 2409.12517; its released code: experimental/fp8_linear.py, fp8_optimizer.py",
    moments=(("exp_avg_sq", _moment("e5m2")), ("exp_avg", _moment("e4m3"))),
    notes=(
        *fp8_smooth_swiglu.notes[:-1],
        "A moment's scale brings its tensor's largest magnitude to the largest value, and is no power of two.",
        "Weights are fp32; the code's fp16 weights with a scale are no part of this recipe.",
    ),
)
