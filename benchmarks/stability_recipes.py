"""Recipes of docs/stability.md that are not named recipes: `--recipes benchmarks/stability_recipes.py:sixteen`."""

from halfstep.quant.scaling import get_scaling
from halfstep.recipe.named.fp8_delayed import delayed_recipe


sixteen = delayed_recipe(
    "fp8-delayed-16",
    get_scaling("delayed", history=16, algorithm="max"),
    summary="fp8-delayed with a history of 16 steps.",
    source="between Megatron-LM's default, 1, and Transformer Engine's, 1024",
)
