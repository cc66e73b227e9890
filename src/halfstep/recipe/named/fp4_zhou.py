"""FP4 in a transformer's MLPs, FP8 around its attention and in the backward pass: the split of Zhou et al."""

from halfstep import formats
from halfstep.quant import ROW, Quantizer, Scales, get_scaling
from halfstep.recipe import KEEP, LinearSpec, Matmul, Recipe, Rule


ATTENTION = ("*attn", "*attn.*", "*ttention", "*ttention.*")
"""Attention's projections, by the name of the module that holds them: Hugging Face's and this package's models."""

_SOURCE = "Zhou et al. 2025, arXiv 2502.11458: its abstract, and others' notes on its cost model"
_NOTES = (
    "Attention's matmuls of q, k and v stay in the compute dtype, as in the source.",
    "A layer under no module called ...attn or ...attention counts as feed-forward, and is in FP4; the plan that "
    "apply returns says if no layer is attention's. Give a model with other names rules of its own.",
    "halfstep's choices, since the source's were not read: E2M1, E4M3 and E5M2; one scale a token and a channel, "
    "along each matmul's shared dimension, in float32 for FP4 and a power of two for FP8; rounding to nearest; bf16 "
    "for all else; backward operands rounded from unrounded tensors.",
    "The source ends training at the target precision: 'fp4-zhou until 90%, then bf16-mixed'. For how long is "
    "halfstep's choice, and what it gains depends on the learning rate that is left.",
)


_e2m1 = Quantizer(formats.get("e2m1fn"), scales=Scales(ROW, get_scaling("current")))
_e4m3, _e5m2 = (Quantizer(formats.get(f), scales=Scales(ROW, get_scaling("rceil"))) for f in ("e4m3fn", "e5m2"))


def _recipe(name: str, grad_input: Matmul, summary: str, note: str, aliases: tuple[str, ...] = ()) -> Recipe:
    def spec(forward: Quantizer) -> LinearSpec:
        return LinearSpec(Matmul(forward, forward), grad_input, Matmul(_e5m2, _e4m3))

    attention = tuple(Rule(path, spec(_e4m3), optional=True, why="attention") for path in ATTENTION)
    rules = (*KEEP, *attention, Rule("*", spec(_e2m1)))
    return Recipe(name, summary, _SOURCE, compute="bf16", rules=rules, aliases=aliases, notes=(note, *_NOTES))


fp4_zhou_dgrad_fp8 = _recipe(
    "fp4-zhou-dgrad-fp8",
    Matmul(_e5m2, _e4m3),
    summary="Feed-forward layers in FP4, attention's projections in FP8; both gradients' matmuls in FP8.",
    note="The input gradient in FP8: what the notes say.",
    aliases=("fp4-zhou",),
)

fp4_zhou_dgrad_bf16 = _recipe(
    "fp4-zhou-dgrad-bf16",
    Matmul(),
    summary="fp4-zhou-dgrad-fp8 whose input gradients come from unrounded operands.",
    note="The input gradient as it is, in bf16: the reading under which the published costs come out.",
)
