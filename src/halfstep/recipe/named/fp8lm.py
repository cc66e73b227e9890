"""FP8-LM's levels: FP8 matmuls, FP8 gradients, and weights stored in fp16 or FP8 with one power of two a tensor."""

from halfstep import formats
from halfstep.quant import TENSOR, Quantizer, Scales, get_scaling
from halfstep.recipe import KEEP, Codes, Recipe, Rule, get_storage, linear_spec


_WINDOW = get_scaling("delayed", history=16, power_of_two=True, warmup=16, restart=True)
_INPUT, _GRAD = (Quantizer(formats.get(f), scales=Scales(TENSOR, _WINDOW)) for f in ("e4m3fn", "e5m2"))
_ONE = Scales(TENSOR, get_scaling("rceil"))
_WEIGHT, _HALF = (Quantizer(formats.get(f), scales=_ONE) for f in ("e4m3fn", "fp16"))
_RULES = (*KEEP, Rule("*", linear_spec(input=_INPUT, weight=_WEIGHT, grad_output=_GRAD)))

_ALL = (
    "Scales are powers of two with amax in the upper half of the range: of inputs and output gradients from the last "
    "16 steps (from the tensor itself until there are 16, and again after an amax that is not finite), of weights and "
    "weight gradients from the tensor itself. MS-AMP returns 1 / the old scale for an infinite amax; this does not.",
    "Biases, norms, embeddings and heads stay in fp32 with fp32 gradients, and compute in bf16 or fp32 as "
    "torch.autocast has it; so do the weights of fused experts, whose matmuls round.",
    "Codes come with the optimizer of halfstep.prepare. With more than one rank, gradients are in fp32, and rounded "
    "after their reduction. halfstep.apply alone only rounds matmuls.",
    "The paper's all-reduce is `halfstep.distributed.compress(ddp, halfstep.recipe.FP8_LM)`; MS-AMP's factor is a "
    "constant 1 / sqrt(ranks): reduce = 'ms_amp'.",
)
_MOMENTS = (("exp_avg_sq", get_storage(_HALF)), ("exp_avg", get_storage(_WEIGHT)))
_SIX = (
    "Gradient, moments and {what} are the paper's 6 bytes. Moments of biases, norms and embeddings are kept so "
    "too; those of SGD and Lion have other names, and are fp32."
)

fp8lm_o1 = Recipe(
    name="fp8lm-o1",
    summary="E4M3/E5M2 matmuls, E4M3 weight gradients, weights in scaled fp16 without a master.",
    source="Peng et al. 2023 (FP8-LM), arXiv 2310.18313; MS-AMP, optimization level O1",
    compute="bf16",
    rules=_RULES,
    codes=Codes(weights=get_storage(_HALF), grads=get_storage(_WEIGHT)),
    notes=_ALL,
)

fp8lm_o2 = Recipe(
    name="fp8lm-o2",
    summary="fp8lm-o1 with the first moment in E4M3 and the second in scaled fp16: 6 bytes in place of 16.",
    source="Peng et al. 2023 (FP8-LM), arXiv 2310.18313; MS-AMP, optimization level O2",
    compute="bf16",
    moments=_MOMENTS,
    rules=_RULES,
    codes=Codes(weights=get_storage(_HALF), grads=get_storage(_WEIGHT)),
    notes=(_SIX.format(what="weight"), *_ALL),
)

fp8lm_o3 = Recipe(
    name="fp8lm-o3",
    summary="fp8lm-o2 with E4M3 weights beside a scaled fp16 master that takes the update.",
    source="Peng et al. 2023 (FP8-LM), arXiv 2310.18313; MS-AMP, optimization level O3",
    compute="bf16",
    moments=_MOMENTS,
    rules=_RULES,
    codes=Codes(weights=get_storage(_WEIGHT), grads=get_storage(_WEIGHT), master=get_storage(_HALF)),
    notes=(
        _SIX.format(what="master") + " The FP8 weight is a seventh.",
        "msamp.initialize takes O1 and O2 only; MS-AMP reaches O3 through DeepSpeed and Megatron-LM.",
        *_ALL,
    ),
)
