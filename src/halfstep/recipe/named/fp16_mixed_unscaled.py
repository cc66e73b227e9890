"""Fp16-mixed without its loss scale, to see what the scale is for."""

from halfstep.recipe.spec import Recipe


fp16_mixed_unscaled = Recipe(
    name="fp16-mixed-unscaled",
    summary="fp16-mixed without a loss scale: small gradients flush to zero in the backward pass.",
    source="the ablation of Micikevicius et al. 2018, arXiv 1710.03740",
    compute="fp16",
)
