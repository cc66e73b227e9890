"""int8-weight-only: weights alone in 8 bits, a scale an output channel, for inference and for adapters beside them."""

from halfstep.quant import get_quantizer
from halfstep.recipe import KEEP, LinearSpec, Matmul, Recipe, Rule


_row = get_quantizer("int8_row")

int8_weight_only = Recipe(
    name="int8-weight-only",
    summary="Weights in int8 with a float32 scale an output channel; all else in bf16.",
    source="Dettmers et al. 2022, arXiv 2208.07339 (LLM.int8()), section 2.1; torchao Int8WeightOnlyConfig",
    weights="bf16",
    update_rounding="stochastic",
    compute="bf16",
    rules=(*KEEP, Rule("*", LinearSpec(output=Matmul(rhs=_row), grad_input=Matmul(rhs=_row.down)))),
    notes=(
        "Both matmuls that take a weight take the same values, so gradients are those of the forward pass.",
        "Made for frozen weights (halfstep.quantize_model); if trained, weights are bf16, with stochastic rounding of "
        "updates.",
        "The scale is amax / 127: codes are -127 to 127, and nothing saturates. Rows are divided by it, and ties go to "
        "even. torchao's is amax / 127.5 and at least 2^-23, its codes -128 to 127: it multiplies by the rounded "
        "reciprocal of the scale, and its largest values saturate.",
    ),
)
