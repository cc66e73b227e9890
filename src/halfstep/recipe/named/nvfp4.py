"""NVFP4 training: E2M1 in blocks of 16 with E4M3 scales, and the measures that keep it stable."""

from dataclasses import replace

from halfstep.quant import Hadamard, Scales, get_quantizer, get_scaling
from halfstep.quant.tile import square
from halfstep.recipe import KEEP, LinearSpec, Matmul, Recipe, Rule


_input = get_quantizer("nvfp4")
_weight = replace(_input, scales=Scales(square(16), get_scaling("two_level")))
_grad = replace(_input, rounding="stochastic")
_LAST = Rule("*", LinearSpec(), optional=True, why="last blocks", blocks="last 15%")

nvfp4 = Recipe(
    name="nvfp4",
    summary="E2M1 in blocks of 16 with two levels of scales, gradients rounded stochastically, weights in squares of "
    "16x16; the weight gradient's operands rotated; the last 15% of the blocks in bf16.",
    source="NVIDIA Transformer Engine, NVFP4BlockScaling; NVIDIA 2025, Pretraining Large Language Models with NVFP4, "
    "arXiv 2509.25149",
    compute="bf16",
    rules=(
        *KEEP,
        _LAST,
        Rule(
            "*",
            LinearSpec(
                output=Matmul(_input, _weight),
                grad_input=Matmul(_grad, _weight),
                grad_weight=Matmul(_grad, _input, hadamard=Hadamard()),
            ),
        ),
    ),
    notes=(
        "A weight has one scale for 16x16 elements, so both of its matmuls take the same values.",
        "The Hadamard transform spreads an outlier over 16 rows of a batch. In a block of 16, whose maximum is stored "
        "well in any case, that raises the rounding error: on two channels 30 times as large as others from 8% to 11%.",
        "Stochastic rounding is right on average for what is not clipped. E4M3's scales are rounded to the nearest, "
        "so the maximum of half the blocks lies beyond 6 and is clipped, by 2% on average; scale = "
        "'two_level_up' clips nothing.",
        "Which linear layers the published run kept is not a rule for other models; readers of the paper report 15% "
        "of them, most at the end. A model without repeated blocks keeps its heads and routers alone.",
    ),
)
