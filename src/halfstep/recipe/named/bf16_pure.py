"""Everything in bfloat16, model.to(torch.bfloat16) with a stock optimizer."""

from halfstep.recipe.spec import LossScale, Recipe


bf16_pure = Recipe(
    name="bf16-pure",
    summary="Weights, gradients and moments in bf16: the memory of model.to(bfloat16) with a stock optimizer.",
    source="option A of Yu et al. 2024 (Collage), arXiv 2405.03637",
    weights="bf16",
    moments="bf16",
    compute="bf16",
    loss_scale=LossScale(init=1.0, dynamic=False),
)
