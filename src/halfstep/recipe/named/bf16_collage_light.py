"""Collage-light: a weight is the sum of two bfloat16 numbers, all else bfloat16."""

from halfstep.recipe.spec import Recipe


bf16_collage_light = Recipe(
    name="bf16-collage-light",
    summary="Each weight is the sum of two bf16 numbers that an update grows; gradients and moments in bf16.",
    source="Yu et al. 2024 (Collage), arXiv 2405.03637, option B",
    weights="bf16",
    master="collage",
    moments="bf16",
    compute="bf16",
)
