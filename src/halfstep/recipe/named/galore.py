"""GaLore: Adam's moments of each matrix in the span of 128 singular vectors of its gradient."""

from halfstep.recipe.projection import Projection
from halfstep.recipe.spec import Recipe


galore = Recipe(
    name="galore",
    summary="fp32 weights, products in bf16 by torch.autocast; Adam in a subspace of each linear layer's gradient.",
    source="Zhao et al. 2024, arXiv 2403.03507",
    compute="bf16",
    projection=Projection(),
    notes=(
        "its bytes are those of what is not projected, the most; of a 1024 x 4096 matrix, states are 1.125",
        "the paper trains bf16 weights: 'galore-bf16'",
        "no rank above half the short side, where a projection would save nothing; the paper's are at most that",
        "moments are not turned when the subspace changes, as in galore-torch",
    ),
)
