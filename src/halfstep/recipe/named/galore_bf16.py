"""GaLore over bfloat16 weights, as the paper trains."""

from dataclasses import replace

from halfstep.recipe.named.galore import galore


galore_bf16 = replace(
    galore,
    name="galore-bf16",
    summary="GaLore with bf16 weights, gradients, first moments and projectors; updates rounded stochastically.",
    weights="bf16",
    moments=(("exp_avg_sq", "fp32"), ("*", "bf16")),
    update_rounding="stochastic",
    notes=(
        "its bytes are those of what is not projected, the most; of a 1024 x 4096 matrix, states are 0.8125",
        "the paper rounds updates to nearest; here stochastically, since small ones are lost otherwise",
        "singular vectors in bf16 are orthonormal to about 2^-8; second moments stay in fp32, since in bf16 they stall",
        *galore.notes[2:],
    ),
)
