"""Bfloat16 weights and gradients with Adam's moments in 8 bits: six bytes a parameter, or seven with a master."""

from dataclasses import replace

from halfstep.recipe.named.adamw_8bit import MAPS
from halfstep.recipe.spec import Recipe


bf16_6byte = Recipe(
    name="bf16-6byte",
    summary="bf16 weights, updates rounded stochastically; moments in 8 bits in blocks of 256: 6.03 bytes in all.",
    source="bf16-stochastic (Zamirai et al. 2020, arXiv 2010.06192) with the moments of Dettmers et al. 2022",
    weights="bf16",
    update_rounding="stochastic",
    compute="bf16",
    moments=MAPS,
    notes=("tensors of fewer than 4096 elements keep fp32 moments, as under adamw-8bit",),
)

bf16_7byte = replace(
    bf16_6byte,
    name="bf16-7byte",
    summary="bf16 weights beside 8 more bits as a master; moments in 8 bits in blocks of 256: 7.03 bytes in all.",
    source="the bytes of FlashOptim (Gonzalez Ortiz et al. 2026, arXiv 2602.23349), moments of Dettmers et al. 2022",
    master="residue",
    update_rounding="nearest_even",
)
