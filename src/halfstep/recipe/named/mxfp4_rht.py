"""MXFP4 in the backward matmuls alone: rotated, and rounded stochastically without clipping."""

from dataclasses import replace

from halfstep.quant import Hadamard, Scales, get_quantizer, get_scaling
from halfstep.quant.tile import block
from halfstep.recipe import KEEP, LinearSpec, Matmul, Recipe, Rule


_scales = Scales(block(32), get_scaling("three_quarters"))
_operand = replace(get_quantizer("mxfp4"), scales=_scales, rounding="stochastic")
_backward = Matmul(_operand, _operand, hadamard=Hadamard(64, "random"))

mxfp4_rht = Recipe(
    name="mxfp4-rht",
    summary="Backward matmuls in MXFP4, all four operands rotated in blocks of 64 and rounded stochastically, three "
    "quarters of them so that none is clipped; forward matmuls in bf16.",
    source="Tseng, Yu and Park 2025, Training LLMs with MXFP4, arXiv 2502.20586, and the authors' code",
    compute="bf16",
    rules=(*KEEP, Rule("*", LinearSpec(grad_input=_backward, grad_weight=_backward))),
    notes=(
        "The signs of the rotation are drawn for each matmul, as in the authors' code.",
        "A dimension that is not a multiple of 64 is padded with zeros, which changes no result.",
        "Gradients are unbiased, since rounding is, and the transform bounds their variance.",
    ),
)
