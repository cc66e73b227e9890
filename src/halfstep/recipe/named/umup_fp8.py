"""u-muP's FP8: static casts without scales; the last layer of each residual branch stays in bfloat16."""

from halfstep import formats
from halfstep.quant import Quantizer
from halfstep.recipe import KEEP, LinearSpec, Recipe, Rule, linear_spec


_e4m3, _e5m2 = (Quantizer(formats.get(name)) for name in ("e4m3fn", "e5m2"))
_FP8 = linear_spec(input=_e4m3, weight=_e4m3, grad_output=_e5m2)
_BRANCH_ENDS = (
    "*.out_proj", "*.o_proj", "*attn.c_proj", "*attention.output.dense", "*attention.proj", "*Attention.o",
    "*.down_proj", "*mlp.c_proj", "*.fc2", "*.output.dense", "*.mlp.2", "*.w2", "*DenseReluDense.wo",
)  # fmt: skip


def _keep(role: str, why: str) -> Rule:
    return Rule("*", LinearSpec(), optional=True, why=why, role=role)


_ENDS = (
    _keep("branch_end", "the last layer of a residual branch"),
    *(Rule(path, LinearSpec(), optional=True, why="the last layer of a residual branch") for path in _BRANCH_ENDS),
)
_OUTER = (_keep("readout", "readout"), _keep("input", "takes the data"))

umup_fp8 = Recipe(
    name="umup-fp8",
    summary="E4M3 forward, E5M2 gradients, no scales; attention's output and the MLP's down-projection stay in bf16.",
    source="Blake et al. 2025 (u-muP), arXiv 2407.17465; Aleph-Alpha/scaling, its FP8 configuration",
    compute="bf16",
    unit_scaled=True,
    rules=(*_OUTER, *_ENDS, *KEEP, Rule("*", _FP8)),
    notes=(
        "Operands are clamped to the format's range and rounded; small values become zero without unit scale.",
        "The layers in bf16 are found by their role (halfstep.unit), and in other models by the names they have there.",
        "About 70 % of a block's multiply-adds are then in FP8 where MLPs are gated, 58 % where they are not.",
    ),
)

munit_fp8 = Recipe(
    name="munit-fp8",
    summary="E4M3 forward, E5M2 gradients, without any scale, in every hidden linear layer.",
    source="Narayan et al. 2025 (munit Scaling), arXiv 2502.05967, section 2 and table 6",
    compute="bf16",
    unit_scaled=True,
    rules=(*_OUTER, *KEEP, Rule("*", _FP8)),
    notes=(
        "Operands are clamped to the format's range and rounded; small values become zero without unit scale.",
        "Embeddings, the readout, norms and attention's own matmuls are in bf16 and float32, as autocast has them.",
    ),
)
