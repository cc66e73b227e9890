"""Bfloat16 weights with fp32 gradient accumulation and an fp32 master copy."""

from halfstep.recipe.spec import Recipe


bf16_megatron = Recipe(
    name="bf16-megatron",
    summary="bf16 weights, gradients accumulated in fp32, fp32 master copy and moments.",
    source="NVIDIA Megatron-LM's documentation of its distributed optimizer: bf16 parameters, fp32 main gradients",
    weights="bf16",
    grads="fp32",
    master="fp32",
    compute="bf16",
)
