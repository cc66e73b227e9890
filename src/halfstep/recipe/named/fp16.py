"""Recipes that compute in float16, with and without a loss scale and fp32 master weights."""

from halfstep.quant import get_accumulator
from halfstep.recipe import LossScale, Recipe, Rule, linear_spec


_SOURCE = "the ablation of Micikevicius et al. 2018, arXiv 1710.03740, whose matmuls accumulate in fp32"
_NOTE = "sums are chains of fused multiply-adds, rounded after each; `accumulate = {format, block}` has longer blocks"


def _rules(format: str) -> tuple[Rule, ...]:
    return (Rule("*", linear_spec(accumulate=get_accumulator(format))),)


fp16_accumulate = Recipe(
    name="fp16-accumulate",
    summary="fp16-mixed whose linear layers' matmuls accumulate in fp16, one product after another.",
    source=_SOURCE,
    compute="fp16",
    loss_scale=LossScale(),
    rules=_rules("fp16"),
    notes=(_NOTE,),
)

bf16_accumulate = Recipe(
    name="bf16-accumulate",
    summary="bf16-mixed whose linear layers' matmuls accumulate in bf16, one product after another.",
    source=_SOURCE,
    compute="bf16",
    rules=_rules("bf16"),
    notes=(_NOTE,),
)

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

fp16_master = Recipe(
    name="fp16-master",
    summary="fp16 weights and gradients, fp32 master copy and moments, dynamic loss scale (apex O2).",
    source="Micikevicius et al. 2018, arXiv 1710.03740; apex O2",
    weights="fp16",
    master="fp32",
    compute="fp16",
    loss_scale=LossScale(),
    aliases=("O2",),
    notes=("batch norms keep fp32 weights and statistics, apex's keep_batchnorm_fp32",),
)

fp16_mixed = Recipe(
    name="fp16-mixed",
    summary="fp32 weights, matmuls in fp16 by torch.autocast; dynamic loss scale.",
    source="torch.autocast and torch.amp.GradScaler; Micikevicius et al. 2018, arXiv 1710.03740",
    compute="fp16",
    loss_scale=LossScale(),
)

fp16_mixed_unscaled = Recipe(
    name="fp16-mixed-unscaled",
    summary="fp16-mixed without a loss scale: small gradients flush to zero in the backward pass.",
    source="the ablation of Micikevicius et al. 2018, arXiv 1710.03740",
    compute="fp16",
)

fp16_nomaster = Recipe(
    name="fp16-nomaster",
    summary="fp16 weights take the update themselves, rounded to nearest; moments in fp32, dynamic loss scale.",
    source="the comparison of Micikevicius et al. 2018, arXiv 1710.03740, section 3.1: fp16-master without its master",
    weights="fp16",
    compute="fp16",
    loss_scale=LossScale(),
    notes=("compared with fp16-master it shows the effect of the master copy; fp16-pure's moments are in fp16 too",),
)

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

fp16_static = Recipe(
    name="fp16-static",
    summary="fp32 weights, matmuls in fp16 by torch.autocast; constant loss scale of 1024.",
    source="Micikevicius et al. 2018, arXiv 1710.03740: constant scales from 8 to 32K",
    compute="fp16",
    loss_scale=LossScale(init=1024.0, dynamic=False),
)
