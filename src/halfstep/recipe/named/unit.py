"""Recipes for models that are unit-scaled: plain casts with a scale of 1, no loss scale, no statistics."""

from dataclasses import replace

from halfstep import formats
from halfstep.quant import Quantizer, get_quantizer
from halfstep.recipe import KEEP, LinearSpec, Recipe, Rule, linear_spec


_SOURCE = "Blake, Orr and Luschi 2023, Unit Scaling, arXiv 2303.11257"
_e4m3, _e5m2 = (Quantizer(formats.get(name)) for name in ("e4m3fn", "e5m2"))
_mx, _nv = get_quantizer("mxfp8_e4m3", scale="rceil"), get_quantizer("nvfp4")
_stochastic = replace(_nv, rounding="stochastic")


def _recipe(name: str, summary: str, linear: LinearSpec, *notes: str) -> Recipe:
    rules = (*KEEP, Rule("*", linear))
    return Recipe(name, summary, _SOURCE, compute="fp16", rules=rules, unit_scaled=True, notes=notes)


unit_fp16 = Recipe(
    name="unit-fp16",
    summary="A unit-scaled model in fp16: autocast, and no loss scale.",
    source=_SOURCE,
    compute="fp16",
    unit_scaled=True,
)

unit_fp8 = _recipe(
    "unit-fp8",
    "A unit-scaled model whose matmuls cast to E4M3, gradients to E5M2, with a scale of 1; the rest is fp16.",
    linear_spec(input=_e4m3, weight=_e4m3, grad_output=_e5m2),
)

unit_fp8_e4m3 = _recipe(
    "unit-fp8-e4m3",
    "unit-fp8 with gradients in E4M3 too.",
    linear_spec(input=_e4m3, weight=_e4m3, grad_output=_e4m3),
)

unit_mxfp8 = _recipe(
    "unit-mxfp8",
    "A unit-scaled model whose matmuls are in MXFP8: E4M3 in blocks of 32; the rest is fp16.",
    linear_spec(input=_mx, weight=_mx, grad_output=_mx),
    "The paper has no blocks.",
)

unit_nvfp4 = _recipe(
    "unit-nvfp4",
    "A unit-scaled model whose matmuls are in NVFP4, its gradients by stochastic rounding; the rest is fp16.",
    linear_spec(input=_nv, weight=_nv, grad_output=_stochastic),
    "The paper has no FP4.",
)
