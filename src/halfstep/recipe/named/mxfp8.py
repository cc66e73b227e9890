"""MXFP8: E4M3 in blocks of 32 along each matmul's shared dimension, with a power-of-two scale."""

from halfstep.quant import get_quantizer
from halfstep.recipe import KEEP, Recipe, Rule, linear_spec


_up, _floor = (get_quantizer("mxfp8_e4m3", scale=rule) for rule in ("rceil", "floor"))

mxfp8 = Recipe(
    name="mxfp8",
    summary="E4M3 everywhere in blocks of 32, each with a power-of-two scale rounded up.",
    source="NVIDIA Transformer Engine, MXFP8BlockScaling; OCP Microscaling Formats (MX) 1.0",
    compute="bf16",
    rules=(*KEEP, Rule("*", linear_spec(input=_up, weight=_up, grad_output=_up))),
    notes=("A tensor is rounded for each of its two matmuls, from unrounded values, since their blocks differ.",),
)

mxfp8_floor = Recipe(
    name="mxfp8-floor",
    summary="mxfp8 with the OCP text's scales, rounded down: the largest values of a block may saturate.",
    source="OCP Microscaling Formats (MX) 1.0, section 6.3",
    compute="bf16",
    rules=(*KEEP, Rule("*", linear_spec(input=_floor, weight=_floor, grad_output=_floor))),
)
