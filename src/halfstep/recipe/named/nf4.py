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
            "Both products that take a weight take the same values: gradients are those of what the forward computed.",
            "Made for weights that stay as they are (halfstep.quantize_model): trained, weights are bf16 ones, updated "
            "stochastically, and the paper trains adapters alone.",
            "bitsandbytes' blocks run through a weight laid out flat: they are these where a layer has 64 n "
            "inputs. It rounds decoded weights to bf16 before the product, which here takes them as they are.",
        ),
    )


nf4 = _of("nf4", get_quantizer("nf4"), "a float32 scale each")
nf4_double = _of("nf4-double", get_quantizer("nf4", scale="double_absmax"), "scales in 8 bits, double-quantised")
