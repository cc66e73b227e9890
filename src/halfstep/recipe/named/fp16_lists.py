"""fp16-mixed with apex O1's lists where they keep in float32 what CPU autocast does not."""

from halfstep.recipe.spec import LossScale, Recipe


fp16_lists = Recipe(
    name="fp16-lists",
    summary="fp16-mixed whose norms, softmax and GELU modules compute in fp32, as in apex O1's lists.",
    source="apex O1: apex/amp/lists",
    compute="fp16",
    float32_modules=("*LayerNorm", "*RMSNorm", "GroupNorm", "LocalResponseNorm", "*Softmax", "Softmin", "*GELU*"),
    loss_scale=LossScale(),
    aliases=("O1",),
    notes=(
        "CPU autocast leaves softmax, log_softmax, layer_norm, exp, log, pow, sum, norm and cumsum in the dtype they "
        "receive; CUDA autocast and apex compute them in fp32",
        "apex O1 also lists gelu, softplus, interpolate and renorm in fp32; torch.autocast lets gelu follow its input",
        "only modules are widened here: a functional call in a model's own code follows torch.autocast's lists",
        "apex's scale stops growing at 2^24; torch.amp.GradScaler's and this one's do not",
    ),
)
