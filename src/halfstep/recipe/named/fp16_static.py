"""Torch.autocast to float16 over fp32 weights, with a constant loss scale."""

from halfstep.recipe.spec import LossScale, Recipe


fp16_static = Recipe(
    name="fp16-static",
    summary="fp32 weights, products in fp16 by torch.autocast; constant loss scale of 1024.",
    source="Micikevicius et al. 2018, arXiv 1710.03740: constant scales from 8 to 32K",
    compute="fp16",
    loss_scale=LossScale(init=1024.0, dynamic=False),
)
