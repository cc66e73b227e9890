"""Torch.autocast to float16 over fp32 weights, with a dynamic loss scale."""

from halfstep.recipe.spec import LossScale, Recipe


fp16_mixed = Recipe(
    name="fp16-mixed",
    summary="fp32 weights, products in fp16 by torch.autocast; dynamic loss scale.",
    source="torch.autocast and torch.amp.GradScaler; Micikevicius et al. 2018, arXiv 1710.03740",
    compute="fp16",
    loss_scale=LossScale(),
)
