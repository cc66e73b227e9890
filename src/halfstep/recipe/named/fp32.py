"""The baseline that every other recipe is measured against."""

from halfstep.recipe import Recipe


fp32 = Recipe(
    name="fp32",
    summary="Everything in float32: the baseline.",
    source="torch's default; apex O0",
    aliases=("O0",),
)
