"""FP8 with delayed power-of-two scales and Smooth-SwiGLU: Fishman et al. 2025, arXiv 2409.12517."""

from dataclasses import replace

from halfstep import formats
from halfstep.quant import TENSOR, Quantizer, Scales, get_scaling
from halfstep.recipe import KEEP, Recipe, Rule, Storage, get_storage, linear_spec


_scaling = get_scaling("delayed", history=1, algorithm="max", power_of_two=True)
_e4m3 = Quantizer(formats.get("e4m3"), scales=Scales(TENSOR, _scaling))  # the one with infinities: its largest is 240
_e5m2 = Quantizer(formats.get("e5m2"), rounding="stochastic", scales=Scales(TENSOR, _scaling))

fp8_smooth_swiglu = Recipe(
    name="fp8-smooth-swiglu",
    summary="E4M3 (max 240) forward, E5M2 gradients, stochastic rounding there, delayed powers of two, Smooth-SwiGLU.",
    source="Fishman et al. 2025, arXiv 2409.12517, and its released code, experimental/fp8_linear.py",
    compute="bf16",
    rules=(*KEEP, Rule("*", linear_spec(input=_e4m3, weight=_e4m3, grad_output=_e5m2))),
    smooth_glu="channel",
    notes=(
        "Needs gated MLPs: modules with gate_proj, up_proj, down_proj and act_fn.",
        "Smoothed by channel, as in the paper; the released code smooths by token (smooth_glu='token').",
        "The scale is of the linear branch's largest magnitude over the tokens of a call; the paper leaves that open.",
        "A scale's history is one optimizer step, the largest amax of its micro-batches and ranks: one global batch.",
        "In the first step each tensor is scaled by its own amax.",
        "The backward matmuls take input and weight as the forward rounded them; the code casts them to E5M2.",
        "Weights are fp32; the code's fp16 weights with a scale and its FP8 moments are no part of this recipe.",
    ),
)


def _moment(name: str) -> Storage:
    return get_storage(Quantizer(formats.get(name), scales=Scales(TENSOR, get_scaling("current"))))


fp8_fishman = replace(
    fp8_smooth_swiglu,
    name="fp8-fishman",
    summary="fp8-smooth-swiglu with the first moment in E4M3 (max 240) and the second in E5M2, one scale a tensor.",
    source="Fishman et al. 2025, arXiv 2409.12517; its released code: experimental/fp8_linear.py, fp8_optimizer.py",
    moments=(("exp_avg_sq", _moment("e5m2")), ("exp_avg", _moment("e4m3"))),
    notes=(
        *fp8_smooth_swiglu.notes[:-1],
        "A moment's scale brings its tensor's largest magnitude to the largest value, and is no power of two.",
        "Weights are fp32; the code's fp16 weights with a scale are no part of this recipe.",
    ),
)
