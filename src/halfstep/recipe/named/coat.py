"""COAT: moments in E4M3 after range expansion, FP8 matmuls with one scale a tensor, and FP8 saved for backward."""

from halfstep import formats
from halfstep.quant import TENSOR, Quantizer, Scales, Tile, get_scaling
from halfstep.recipe import COAT, KEEP, Recipe, Rule, get_storage, linear_spec


_e4m3, _e5m2 = (Quantizer(formats.get(f), scales=Scales(TENSOR, get_scaling("current"))) for f in ("e4m3fn", "e5m2"))
_GROUPS = Scales(Tile(1, 128), get_scaling("expansion_sixteenths"))

coat = Recipe(
    name="coat",
    summary="Moments in E4M3, their range expanded in groups of 128; FP8 matmuls; saved activations in FP8 too.",
    source="Xi et al. 2025 (COAT), arXiv 2410.19313; NVlabs/COAT for the constants",
    compute="bf16",
    moments=(("*", get_storage(Quantizer(formats.get("e4m3fn"), scales=_GROUPS), flat=True)),),
    rules=(*KEEP, Rule("*", linear_spec(input=_e4m3, weight=_e4m3, grad_output=_e5m2))),
    saved=COAT,
    notes=(
        "The exponent of a group is the released kernel's: log2(448^2 / 2) over log2 of the group's range, rounded "
        "down to sixteenths. The paper's has log2(448 / 2^-9) and is not rounded: scale rule `expansion`.",
        "Zeros in a group stay zeros and do not count as its smallest magnitude; the released kernel takes a zero that "
        "comes first for that, and adds 1e-30 to both magnitudes.",
        "The scale of a 1 x 16 group is bf16(amax / 448); the released kernel adds 1e-10 to amax.",
        "Inputs of attention and of rotary positions, the residual stream and what a model's own code saves stay as "
        "they are: halfstep.tracking.saving says how much that is. torch.compile decides by itself what a graph keeps.",
        "A moment is rounded at every step, and what was rounded once is rounded again.",
    ),
)
