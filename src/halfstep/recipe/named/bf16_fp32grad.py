"""Bfloat16 weights, gradients accumulated in float32, no master copy."""

from halfstep.recipe.spec import Recipe


bf16_fp32grad = Recipe(
    name="bf16-fp32grad",
    summary="bf16 weights take the update themselves; gradients accumulate in fp32: 14 bytes, and updates are lost.",
    source="the second option of a discussion on the PyTorch forum, as asked there",
    weights="bf16",
    grads="fp32",
    compute="bf16",
)
