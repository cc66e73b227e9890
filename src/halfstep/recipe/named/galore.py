"""GaLore: Adam in the span of 128 singular vectors of the gradient of each matrix."""

from dataclasses import replace

from halfstep.recipe import PROJECTOR, Projection, Recipe
from halfstep.recipe.named.adamw_8bit import MAPS, adamw_8bit


galore = Recipe(
    name="galore",
    summary="fp32 weights, matmuls in bf16 by torch.autocast; Adam in a subspace of each linear layer's gradient.",
    source="Zhao et al. 2024, arXiv 2403.03507",
    compute="bf16",
    projection=Projection(),
    notes=(
        "bytes are those of unprojected weights; states of a 1024 x 4096 matrix take 1.125 bytes a parameter",
        "the paper trains bf16 weights: 'galore-bf16'",
        "no rank above half the short side, where a projection would save nothing; the paper's are at most that",
        "moments are not converted to a new subspace, as in galore-torch",
    ),
)

galore_8bit = replace(
    galore,
    name="galore-8bit",
    summary="GaLore whose projected moments are in 8 bits, the dynamic maps in blocks of 256; the projector in fp32.",
    source=f"{galore.source}; {adamw_8bit.source}",
    moments=((PROJECTOR, "fp32"), *MAPS),
    notes=(
        "bytes are those of unprojected weights; states of a 1024 x 4096 matrix take 0.3789 bytes a parameter",
        "projected moments of fewer than 4096 numbers stay in fp32, as in bitsandbytes",
        *galore.notes[2:],
    ),
)

galore_bf16 = replace(
    galore,
    name="galore-bf16",
    summary="GaLore with bf16 weights, gradients, first moments and projectors; updates rounded stochastically.",
    weights="bf16",
    moments=(("exp_avg_sq", "fp32"), ("*", "bf16")),
    update_rounding="stochastic",
    notes=(
        "bytes are those of unprojected weights; states of a 1024 x 4096 matrix take 0.8125 bytes a parameter",
        "the paper rounds updates to nearest; here stochastically, since small ones are lost otherwise",
        "singular vectors in bf16 are orthonormal to about 2^-8; second moments stay in fp32, since in bf16 they stall",
        *galore.notes[2:],
    ),
)
