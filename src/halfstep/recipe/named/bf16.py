"""Recipes that compute in bfloat16, by what they store in it and what master weights they have."""

from dataclasses import replace

from halfstep import formats
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, LossScale, Matmul, Recipe, Rule, get_storage
from halfstep.recipe.named.adamw_8bit import MAPS


bf16_6byte = Recipe(
    name="bf16-6byte",
    summary="bf16 weights, updates rounded stochastically; moments in 8 bits in blocks of 256: 6.03 bytes in all.",
    source="bf16-stochastic (Zamirai et al. 2020, arXiv 2010.06192) with the moments of Dettmers et al. 2022",
    weights="bf16",
    update_rounding="stochastic",
    compute="bf16",
    moments=MAPS,
    notes=("tensors of fewer than 4096 elements keep fp32 moments, as under adamw-8bit",),
)

bf16_7byte = replace(
    bf16_6byte,
    name="bf16-7byte",
    summary="bf16 weights beside 8 more bits as a master; moments in 8 bits in blocks of 256: 7.03 bytes in all.",
    source="the bytes of FlashOptim (Gonzalez Ortiz et al. 2026, arXiv 2602.23349), moments of Dettmers et al. 2022",
    master="residue",
    update_rounding="nearest_even",
)

bf16_collage_light = Recipe(
    name="bf16-collage-light",
    summary="Each weight is the sum of two bf16 numbers that an update grows; gradients and moments in bf16.",
    source="Yu et al. 2024 (Collage), arXiv 2405.03637, option B",
    weights="bf16",
    master="collage",
    moments="bf16",
    compute="bf16",
)

bf16_collage_plus = Recipe(
    name="bf16-collage-plus",
    summary="Collage-light whose second moment is the sum of two bf16 numbers too: beta2 = 0.999 is 1 in bf16.",
    source="Yu et al. 2024 (Collage), arXiv 2405.03637, option C",
    weights="bf16",
    master="collage",
    moments=(("exp_avg_sq", get_storage("bf16", residual=True)), ("*", "bf16")),
    compute="bf16",
)

bf16_fp32grad = Recipe(
    name="bf16-fp32grad",
    summary="bf16 weights take the update themselves; gradients accumulate in fp32: 14 bytes, and updates are lost.",
    source="the second option of a discussion on the PyTorch forum, as asked there",
    weights="bf16",
    grads="fp32",
    compute="bf16",
)

bf16_kahan = Recipe(
    name="bf16-kahan",
    summary="bf16 weights; what an update rounds away is kept in bf16 and added again at the next; fp32 moments.",
    source="Zamirai et al. 2020, arXiv 2010.06192; torchdistx AnyPrecisionAdamW",
    weights="bf16",
    master="kahan",
    compute="bf16",
)

bf16_master = Recipe(
    name="bf16-master",
    summary="bf16 weights and gradients, fp32 master copy and moments.",
    source="NVIDIA NeMo's bf16 with fp32 master weights",
    weights="bf16",
    master="fp32",
    compute="bf16",
)

bf16_megatron = Recipe(
    name="bf16-megatron",
    summary="bf16 weights, gradients accumulated in fp32, fp32 master copy and moments.",
    source="NVIDIA Megatron-LM's documentation of its distributed optimizer: bf16 parameters, fp32 main gradients",
    weights="bf16",
    grads="fp32",
    master="fp32",
    compute="bf16",
)

bf16_mixed = Recipe(
    name="bf16-mixed",
    summary="fp32 weights, matmuls in bf16 by torch.autocast; no loss scaling.",
    source="torch.autocast; Kalamkar et al. 2019, arXiv 1905.12322",
    compute="bf16",
)

bf16_nomaster = Recipe(
    name="bf16-nomaster",
    summary="bf16 weights take the update themselves, rounded to nearest: updates below half an ulp are lost.",
    source="option D without master weights of Yu et al. 2024 (Collage), arXiv 2405.03637",
    weights="bf16",
    compute="bf16",
)

bf16_pure = Recipe(
    name="bf16-pure",
    summary="Weights, gradients and moments in bf16: the memory of model.to(bfloat16) with a stock optimizer.",
    source="option A of Yu et al. 2024 (Collage), arXiv 2405.03637",
    weights="bf16",
    moments="bf16",
    compute="bf16",
    loss_scale=LossScale(init=1.0, dynamic=False),
)

bf16_split = Recipe(
    name="bf16-split",
    summary="fp32 weights in two halves: the upper one, rounded (ties away), is the bf16 weight; an exact master.",
    source="the two halves are the float32 number",
    weights="bf16",
    master="split",
    compute="bf16",
)

bf16_stochastic = Recipe(
    name="bf16-stochastic",
    summary="bf16 weights take the update themselves, rounded stochastically: right on average, at 12 bytes.",
    source="Zamirai et al. 2020, arXiv 2010.06192",
    weights="bf16",
    update_rounding="stochastic",
    compute="bf16",
)

_truncate = Quantizer(formats.get("bf16"), "toward_zero", "ieee")
_product = Matmul(_truncate, _truncate)

bf16_truncate = Recipe(
    name="bf16-truncate",
    summary="bf16-mixed with matmul operands rounded toward zero: every operand shrinks, by 0.3 % on average.",
    source="the rounding question of Kalamkar et al. 2019, arXiv 1905.12322",
    compute="bf16",
    rules=(Rule("*", LinearSpec(_product, _product, _product)),),
)
