"""FP8 with a power-of-two scale a tensor, from its own amax with headroom to accumulate in fp16, or one for all."""

from halfstep import formats
from halfstep.quant import TENSOR, Quantizer, Scales, Scaling, get_scaling
from halfstep.recipe import KEEP, LossScale, Recipe, Rule, linear_spec


_SOURCE = "Perez et al. 2023, arXiv 2309.17224"
_NOTE = (
    "The paper rounds the linear layers of decoder blocks; here all but heads and routers. Its weights are fp16 "
    "without a float32 master, its loss scales 512 to 32768 by model size (needed for fp16 accumulation only)."
)


def _rules(scaling: Scaling) -> tuple[Rule, ...]:
    e4, e5 = (Quantizer(formats.get(f), scales=Scales(TENSOR, scaling)) for f in ("e4m3fnuz", "e5m2fnuz"))
    return (*KEEP, Rule("*", linear_spec(input=e4, weight=e4, grad_output=e5)))


fp8_amax = Recipe(
    name="fp8-amax",
    summary="fp16 weights; matmuls in E4M3 (max 240) and E5M2 with just-in-time power-of-two scales, margin 3.",
    source=f"{_SOURCE}, FP8-AMAX",
    weights="fp16",
    compute="fp16",
    loss_scale=LossScale(init=512, dynamic=False),
    rules=_rules(get_scaling("rceil", margin=3)),
    notes=(_NOTE,),
)

fp8_cscale = Recipe(
    name="fp8-cscale",
    summary="fp8-amax with one constant scale, 1, for all weights, activations and gradients.",
    source=f"{_SOURCE}, FP8-CSCALE",
    weights="fp16",
    compute="fp16",
    loss_scale=LossScale(init=512, dynamic=False),
    rules=_rules(get_scaling("fixed")),
    notes=(_NOTE, "The paper sweeps the constant; its window closes as models grow: [-3, 2] at 111M, [-1, 0] at 13B."),
)
