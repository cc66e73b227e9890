"""Bfloat16 weights take the update themselves; small updates are lost."""

from halfstep.recipe.spec import Recipe


bf16_nomaster = Recipe(
    name="bf16-nomaster",
    summary="bf16 weights take the update themselves, rounded to nearest: updates below half an ulp are lost.",
    source="option D without master weights of Yu et al. 2024 (Collage), arXiv 2405.03637",
    weights="bf16",
    compute="bf16",
)
