"""8-bit GaLore: its moments are codes of the dynamic maps."""

from dataclasses import replace

from halfstep.recipe.named.adamw_8bit import MAPS, adamw_8bit
from halfstep.recipe.named.galore import galore
from halfstep.recipe.projection import PROJECTOR


galore_8bit = replace(
    galore,
    name="galore-8bit",
    summary="GaLore whose projected moments are in 8 bits, the dynamic maps in blocks of 256; the projector in fp32.",
    source=f"{galore.source}; {adamw_8bit.source}",
    moments=((PROJECTOR, "fp32"), *MAPS),
    notes=(
        "its bytes are those of what is not projected, the most; of a 1024 x 4096 matrix, states are 0.3789",
        "projected moments of fewer than 4096 numbers stay in fp32, as in bitsandbytes",
        *galore.notes[2:],
    ),
)
