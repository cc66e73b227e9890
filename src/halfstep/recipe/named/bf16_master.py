"""Bfloat16 weights and gradients, an fp32 master copy takes the update."""

from halfstep.recipe.spec import Recipe


bf16_master = Recipe(
    name="bf16-master",
    summary="bf16 weights and gradients, fp32 master copy and moments.",
    source="NVIDIA NeMo's bf16 with fp32 master weights",
    weights="bf16",
    master="fp32",
    compute="bf16",
)
