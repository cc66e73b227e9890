"""Collage-plus: weights and second moments are sums of two bfloat16 numbers."""

from halfstep.recipe.spec import Recipe


bf16_collage_plus = Recipe(
    name="bf16-collage-plus",
    summary="Collage-light whose second moment is the sum of two bf16 numbers too: beta2 = 0.999 is 1 in bf16.",
    source="Yu et al. 2024 (Collage), arXiv 2405.03637, option C",
    weights="bf16",
    master="collage",
    moments="bf16",
    moment_residuals=("exp_avg_sq",),
    compute="bf16",
)
