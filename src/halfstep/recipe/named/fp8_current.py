"""FP8 with one scale a tensor, from the tensor itself."""

from halfstep import formats
from halfstep.quant import TENSOR, Quantizer, Scales, get_scaling
from halfstep.recipe import KEEP, Recipe, Rule, linear_spec


_e4m3, _e5m2 = (Quantizer(formats.get(f), scales=Scales(TENSOR, get_scaling("current"))) for f in ("e4m3fn", "e5m2"))

fp8_current = Recipe(
    name="fp8-current",
    summary="E4M3 forward, E5M2 gradients, one float32 scale a tensor from its own amax.",
    source="NVIDIA Transformer Engine, Float8CurrentScaling; torchao float8, tensorwise",
    compute="bf16",
    rules=(*KEEP, Rule("*", linear_spec(input=_e4m3, weight=_e4m3, grad_output=_e5m2))),
    notes=("An infinity or NaN makes its tensor NaN, so that it is seen; Transformer Engine then takes scale 1.",),
)
