"""Everything in float16 (apex O3). It breaks: the second moment underflows."""

from halfstep.recipe.spec import LossScale, Recipe


fp16_pure = Recipe(
    name="fp16-pure",
    summary="Weights, gradients and moments in fp16 (apex O3): the squares of small gradients become zero.",
    source="apex O3",
    weights="fp16",
    moments="fp16",
    compute="fp16",
    loss_scale=LossScale(init=1.0, dynamic=False),
    aliases=("O3",),
    notes=("apex O3 casts batch norms too; here they keep fp32 weights and statistics",),
)
