"""Bfloat16 weights whose lower 16 bits are kept apart: an exact master at 14 bytes."""

from halfstep.recipe.spec import Recipe


bf16_split = Recipe(
    name="bf16-split",
    summary="fp32 weights in two halves: the upper one, rounded (ties away), is the bf16 weight; an exact master.",
    source="the two halves are the float32 number",
    weights="bf16",
    master="split",
    compute="bf16",
)
