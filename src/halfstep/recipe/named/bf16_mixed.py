"""Torch.autocast to bfloat16 over fp32 weights."""

from halfstep.recipe.spec import Recipe


bf16_mixed = Recipe(
    name="bf16-mixed",
    summary="fp32 weights, products in bf16 by torch.autocast; no loss scaling.",
    source="torch.autocast; Kalamkar et al. 2019, arXiv 1905.12322",
    compute="bf16",
)
