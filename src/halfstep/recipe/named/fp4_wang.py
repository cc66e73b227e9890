"""FP4 matmuls of Wang et al. 2025: as in the paper, and as in the code released with it."""

from dataclasses import replace

from halfstep import formats
from halfstep.quant import ROW, TENSOR, Clamp, Estimator, Quantizer, Scales, get_scaling
from halfstep.recipe import KEEP, LinearSpec, Matmul, Recipe, Rule
from halfstep.recipe.named.fp8lm import fp8lm_o2


def _spec(input: Quantizer, weight: Quantizer, grad: Quantizer) -> LinearSpec:
    """A spec whose backward matmuls take the values that the forward rounded input and weight to."""
    return LinearSpec(Matmul(input, weight), Matmul(grad, weight.down), Matmul(grad, input.down))


def _fp4(rule: str) -> Quantizer:
    return Quantizer(formats.get("fp4"), "nearest_up", scales=Scales(ROW, get_scaling(rule)))


_GRAD = Quantizer(formats.get("e5m2"), scales=Scales(TENSOR, get_scaling("current")))
_INPUT = replace(_fp4("current"), clamp=Clamp(0.99, "tensor"))
_WEIGHT = replace(_fp4("current"), estimator=Estimator(5.0, 3.0))
_TOKEN = replace(_fp4("rceil"), clamp=Clamp(0.99, "row", compensation=False))
_CHANNEL = replace(_fp4("rceil").down, estimator=Estimator(5.0, 3.0))

_SOURCE = "Wang et al. 2025, Optimizing Large Language Model Training Using FP4 Quantization, arXiv 2501.17116"
_BOTH = (
    "Numbers half way between two FP4 values go to the upper one, as the thresholds of the source's look-up do.",
    "The weight's gradient is multiplied by the derivative of a curve (k = 5) that is capped at 3: its mean over any "
    "interval is then 0.594, not 1. Adam mostly undoes that, SGD does not.",
)

fp4_wang = Recipe(
    name="fp4-wang",
    summary="E2M1 matmuls with a scale a token and an output channel, outliers unrounded, and FP8-LM's states.",
    source=_SOURCE + ", sections 3 and 4.1",
    compute="bf16",
    moments=fp8lm_o2.moments,
    rules=(*KEEP, Rule("*", _spec(_INPUT, _WEIGHT, _GRAD))),
    codes=fp8lm_o2.codes,
    notes=(
        "An input is clamped at the quantiles 0.01 and 0.99 of its tensor (whether they are a tensor's or a token's is "
        "not said), rounded, and multiplied with what was clamped away beside it, unrounded and sparse: in the forward "
        "and in the weight gradient. clamp = {estimate = 'histogram'} cuts values to 8 bits to find them.",
        "The backward matmuls, which the paper does not specify, take E5M2 output gradients with one scale a tensor, "
        "and the rounded input and weight of the forward. Their scales, which lie along what is summed over, multiply "
        "the output gradient before it is rounded: all three matmuls are exact before their last rounding.",
        *_BOTH,
        "Moments, weights and their gradients are fp8lm-o2's: first moment E4M3, second scaled fp16, E4M3 gradients, "
        "scaled fp16 weights; the paper names the moments and the gradients that are communicated.",
        *fp8lm_o2.notes[3:5],
    ),
)

fp4_wang_msamp = Recipe(
    name="fp4-wang-msamp",
    summary="E2M1 matmuls as released: powers of two a token and an input channel, clamped per token, E5M2 gradients.",
    source=_SOURCE + "; its released code: MS-AMP, FP4 operators, megatron/layers.py",
    compute="bf16",
    rules=(*KEEP, Rule("*", _spec(_TOKEN, _CHANNEL, _GRAD))),
    notes=(
        "A scale is 2^ceil(log2(amax / 6)): up to half of FP4's range stays unused. A weight has one for each of its "
        "input channels, where the paper has one an output channel.",
        "Inputs are clamped at the quantiles 0.01 and 0.99 of each token, and what is beyond is lost.",
        "Backward matmuls take E5M2 output gradients and the values that the forward rounded input and weight to. All "
        "of it fits bf16.",
        *_BOTH,
    ),
)
