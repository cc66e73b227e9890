"""FP8 in tiles of 1x128 and blocks of 128x128 with power-of-two scales."""

from halfstep.quant import get_quantizer
from halfstep.recipe import KEEP, Recipe, Rule, linear_spec


_row, _square = (get_quantizer(name, scale="rceil") for name in ("fp8_1x128", "fp8_128x128"))

fp8_block = Recipe(
    name="fp8-block",
    summary="E4M3 with power-of-two scales: inputs and gradients in tiles of 1x128, weights in blocks of 128x128.",
    source="NVIDIA Transformer Engine, Float8BlockScaling; DeepSeek-V3, arXiv 2412.19437, section 3.3",
    compute="bf16",
    rules=(*KEEP, Rule("*", linear_spec(input=_row, weight=_square, grad_output=_row))),
)
