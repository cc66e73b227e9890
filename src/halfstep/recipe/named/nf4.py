"""NF4: weights alone in 4 bits, in blocks of 64, for inference and for adapters trained beside them (QLoRA)."""

from halfstep.quant import Quantizer, get_quantizer
from halfstep.recipe import KEEP, LinearSpec, Matmul, Recipe, Rule


def _of(name: str, weight: Quantizer, scales: str) -> Recipe:
    products = LinearSpec(output=Matmul(rhs=weight), grad_input=Matmul(rhs=weight.down))
    return Recipe(
        name=name,
        summary=f"Weights in NormalFloat of 4 bits, in blocks of 64 with {scales}; all else in bf16.",
        source="Dettmers et al. 2023, arXiv 2305.14314 (QLoRA), section 3; bitsandbytes",
        weights="bf16",
        update_rounding="stochastic",
        compute="bf16",
        rules=(*KEEP, Rule("*", products)),
        notes=(
            "Both matmuls that take a weight take the same values, so gradients are those of the forward pass.",
            "Made for frozen weights (halfstep.quantize_model); if trained, weights are bf16, with stochastic rounding "
            "of updates. The paper trains adapters only.",
            "bitsandbytes' blocks run along the flattened weight: they equal these if a layer's inputs are a multiple "
            "of 64. It rounds decoded weights to bf16 before the matmul; this does not.",
        ),
    )


nf4 = _of("nf4", get_quantizer("nf4"), "a float32 scale each")
nf4_double = _of("nf4-double", get_quantizer("nf4", scale="double_absmax"), "scales in 8 bits, double-quantised")
