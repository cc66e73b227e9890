"""16-bit products whose sums are 16-bit too: what matrix units that add up in float32 are for."""

from halfstep.quant import get_accumulator
from halfstep.recipe.products import linear_spec
from halfstep.recipe.rule import Rule
from halfstep.recipe.spec import LossScale, Recipe


_SOURCE = "the ablation of Micikevicius et al. 2018, arXiv 1710.03740, whose products add up in fp32"
_NOTE = "chains of fused multiply-adds, an addition a product; longer blocks are `accumulate = {format, block}`"


def _rules(format: str) -> tuple[Rule, ...]:
    return (Rule("*", linear_spec(accumulate=get_accumulator(format))),)


fp16_accumulate = Recipe(
    name="fp16-accumulate",
    summary="fp16-mixed whose linear layers' products add up in fp16, one product after another.",
    source=_SOURCE,
    compute="fp16",
    loss_scale=LossScale(),
    rules=_rules("fp16"),
    notes=(_NOTE,),
)

bf16_accumulate = Recipe(
    name="bf16-accumulate",
    summary="bf16-mixed whose linear layers' products add up in bf16, one product after another.",
    source=_SOURCE,
    compute="bf16",
    rules=_rules("bf16"),
    notes=(_NOTE,),
)
