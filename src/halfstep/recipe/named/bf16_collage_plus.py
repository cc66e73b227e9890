"""Collage-plus: weights and second moments are sums of two bfloat16 numbers."""

from halfstep.recipe.spec import Recipe
from halfstep.recipe.storage import get_storage


bf16_collage_plus = Recipe(
    name="bf16-collage-plus",
    summary="Collage-light whose second moment is the sum of two bf16 numbers too: beta2 = 0.999 is 1 in bf16.",
    source="Yu et al. 2024 (Collage), arXiv 2405.03637, option C",
    weights="bf16",
    master="collage",
    moments=(("exp_avg_sq", get_storage("bf16", residual=True)), ("*", "bf16")),
    compute="bf16",
)
