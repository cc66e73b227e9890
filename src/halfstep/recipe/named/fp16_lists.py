"""fp16-mixed with apex O1's lists of what computes in float32, modules and functions, on any device."""

from halfstep.recipe.spec import LossScale, Recipe


fp16_lists = Recipe(
    name="fp16-lists",
    summary="fp16-mixed whose norms, softmax, GELU, exponents, powers and sums compute in fp32, as in apex O1's lists.",
    source="apex O1: apex/amp/lists",
    compute="fp16",
    float32_modules=("*LayerNorm", "*RMSNorm", "GroupNorm", "LocalResponseNorm", "*Softmax", "Softmin", "*GELU*"),
    float32_functions=(
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log1p",
        "log2",
        "logsumexp",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "cumprod",
        "cumsum",
        "dist",
        "norm",
        "prod",
        "std",
        "sum",
        "var",
        "renorm",
        "interpolate",
        "grid_sample",
        "softplus",
        "softmin",
        "softmax",
        "log_softmax",
        "gelu",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "local_response_norm",
        "normalize",
        "cosine_similarity",
    ),
    loss_scale=LossScale(),
    aliases=("O1",),
    notes=(
        "CPU autocast leaves softmax, layer_norm, exp, log, pow, sum, norm and others in the dtype they receive, which "
        "CUDA autocast and apex compute in fp32; apex lists gelu, std, var, interpolate and renorm as well, which CUDA "
        "autocast does not. Here the list is the recipe's, on any device; rms_norm, logsumexp and log1p join it",
        "calls in place, with out= or with a dtype of their own are left alone, as torch.autocast leaves them",
        "activation checkpointing of a module computes again as it did; of a function between modules it needs "
        "context_fn=lambda: (contextlib.nullcontext(), halfstep.following(model)): torch restores autocast alone, and "
        "says that the recomputed dtypes differ (with use_reentrant=True it does not say so)",
        "apex's scale stops growing at 2^24; torch.amp.GradScaler's and this one's do not",
    ),
)
