"""Adam's moments in E4M3, in blocks of 256 of the flattened tensor."""

from halfstep import formats
from halfstep.quant import Quantizer, Scales, Tile, get_scaling
from halfstep.recipe import Recipe, get_storage


_BLOCKS = Scales(Tile(1, 256), get_scaling("absmax"))

fp8_adam = Recipe(
    name="fp8-adam",
    summary="fp32 weights, matmuls in bf16 by torch.autocast; both moments in E4M3, in blocks of 256.",
    source="torchao 0.18, optim.AdamWFp8",
    compute="bf16",
    moments=(("*", get_storage(Quantizer(formats.get("e4m3fn"), scales=_BLOCKS), flat=True, smallest=4096)),),
    notes=(
        "torchao keeps both moments in E4M3 (Fishman et al. keep the second in E5M2), and tensors of fewer than 4096 "
        "elements in the parameter's dtype; so does this.",
        "torchao also leaves tensors alone that are no multiple of 256, where this has a short last block. It takes a "
        "block's amax for at least 1e-12, so that second moments below 2e-18 become zero.",
        "In E4M3 a second moment below 2^-18.8 of its block's largest becomes zero. The step that follows divides by "
        "what its own gradient adds, or, without one, by eps.",
    ),
)
