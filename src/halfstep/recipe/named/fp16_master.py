"""Float16 weights and gradients, fp32 master copy, dynamic loss scale."""

from halfstep.recipe.spec import LossScale, Recipe


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
