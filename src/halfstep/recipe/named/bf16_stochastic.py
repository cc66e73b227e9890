"""Bfloat16 weights whose update is rounded stochastically, so none is lost on average."""

from halfstep.recipe.spec import Recipe


bf16_stochastic = Recipe(
    name="bf16-stochastic",
    summary="bf16 weights take the update themselves, rounded stochastically: right on average, at 12 bytes.",
    source="Zamirai et al. 2020, arXiv 2010.06192",
    weights="bf16",
    update_rounding="stochastic",
    compute="bf16",
)
