"""Bfloat16 weights with Kahan compensation."""

from halfstep.recipe.spec import Recipe


bf16_kahan = Recipe(
    name="bf16-kahan",
    summary="bf16 weights; what an update rounds away is kept in bf16 and added again at the next; fp32 moments.",
    source="Zamirai et al. 2020, arXiv 2010.06192; torchdistx AnyPrecisionAdamW",
    weights="bf16",
    master="kahan",
    compute="bf16",
)
