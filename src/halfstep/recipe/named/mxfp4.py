"""MXFP4: E2M1 in blocks of 32 along each matmul's shared dimension, with a power-of-two scale."""

from halfstep.quant import get_quantizer
from halfstep.recipe import KEEP, Recipe, Rule, linear_spec


_block = get_quantizer("mxfp4")

mxfp4 = Recipe(
    name="mxfp4",
    summary="E2M1 everywhere in blocks of 32, each with a power-of-two scale rounded down, rounded to the nearest.",
    source="OCP Microscaling Formats (MX) 1.0, sections 5 and 6.3",
    compute="bf16",
    rules=(*KEEP, Rule("*", linear_spec(input=_block, weight=_block, grad_output=_block))),
    notes=(
        "OCP's scales, rounded down, clip the maxima of 42% of blocks, averaged over all magnitudes; scale = 'rceil' "
        "clips nothing.",
    ),
)
