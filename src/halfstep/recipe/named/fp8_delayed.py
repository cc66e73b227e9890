"""FP8 with one scale a tensor, from the amaxes of earlier steps: Transformer Engine's DelayedScaling."""

from halfstep import formats
from halfstep.quant import TENSOR, Quantizer, Scales, Scaling, get_scaling
from halfstep.recipe import KEEP, Recipe, Rule, linear_spec


_FIRST = (
    "In the first step each tensor is scaled by its own amax. The source's first scale is 1, under which small "
    "activations and gradients vanish, so that a cold model wakes one layer a step; warmup = 0 has it."
)


def delayed_recipe(name: str, scaling: Scaling, summary: str, source: str, notes: tuple[str, ...] = ()) -> Recipe:
    """The recipe with another amax history, algorithm or margin."""
    e4m3, e5m2 = (Quantizer(formats.get(f), scales=Scales(TENSOR, scaling)) for f in ("e4m3fn", "e5m2"))
    rules = (*KEEP, Rule("*", linear_spec(input=e4m3, weight=e4m3, grad_output=e5m2)))
    return Recipe(name, summary, source, compute="bf16", rules=rules, notes=notes)


fp8_delayed = delayed_recipe(
    "fp8-delayed",
    get_scaling("delayed", history=1024, algorithm="max", margin=0),
    summary="E4M3 forward, E5M2 gradients, one scale a tensor from the largest amax of the last 1024 steps.",
    source="NVIDIA Transformer Engine, DelayedScaling and its defaults (fp8_format HYBRID)",
    notes=(
        _FIRST,
        "Values beyond the amax of the history saturate, infinities too, as in Transformer Engine: the loss may look "
        "usual, but halfstep.track names the tensor. NaN stays NaN.",
    ),
)

fp8_delayed_megatron = delayed_recipe(
    "fp8-delayed-megatron",
    get_scaling("delayed", history=1, algorithm="most_recent"),
    summary="fp8-delayed whose scale follows the last step's amax alone.",
    source="Megatron-LM's defaults: fp8_amax_history_len 1, most_recent, margin 0",
    notes=(
        _FIRST,
        "An amax that alternates between 1 and 8 saturates in every second step; fp8-delayed's history does not.",
    ),
)
