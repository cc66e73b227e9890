"""Adam's moments in 8 bits: two dynamic maps, in blocks of 256 of the flattened tensor."""

from halfstep import formats
from halfstep.quant import Quantizer, Scales, Tile, get_scaling
from halfstep.recipe import Recipe, Storage, get_storage


def _map(name: str) -> Storage:
    blocks = Scales(Tile(1, 256), get_scaling("absmax"))
    return get_storage(Quantizer(formats.get(name), scales=blocks), flat=True, smallest=4096)


MAPS = (("exp_avg_sq", _map("dynamic8_unsigned")), ("*", _map("dynamic8")))
"""How Adam's two moments are stored."""


adamw_8bit = Recipe(
    name="adamw-8bit",
    summary="fp32 weights, matmuls in bf16 by torch.autocast; moments in 8 bits, the dynamic maps in blocks of 256.",
    source="Dettmers et al. 2022, arXiv 2110.02861; bitsandbytes for the blocks of 256",
    compute="bf16",
    moments=MAPS,
    notes=(
        "tensors of fewer than 4096 elements keep fp32 moments, as in bitsandbytes",
        "Rounding to nearest changes no sign, since the map has 0: bitsandbytes' sign fix only moves negative first "
        "moments whose nearest value is 0 to the negative value next to it, and here they become 0.",
    ),
)
