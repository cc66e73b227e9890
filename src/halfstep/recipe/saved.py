"""How a recipe keeps what autograd saves for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep import formats
from halfstep.errors import RecipeError
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from halfstep.recipe.storage import Storage, get_storage


@dataclass(frozen=True)
class Saved:
    """How tensors are kept between the forward and the backward pass, where they are not kept as they are.

    Only what `nn.apply` knows by the module that saves it: inputs of attention and of rotary positions, the residual
    stream, softmax's statistics and whatever a model's own code saves stay as they are, and so do parameters.

    Raises:
        RecipeError: neither is given; a storage with a residual, or that leaves small tensors in fp32.
    """

    operands: bool = False
    """Inputs of linear products are kept as the codes that the products rounded them to, once for all products that
    take them; weights are rounded again. No number changes."""
    nonlinear: Storage | None = None
    """What norms, activation functions and gated products save of their inputs' shape."""

    def __post_init__(self) -> None:
        if not self.operands and self.nonlinear is None:
            raise RecipeError("saved with operands = false and no nonlinear: it keeps nothing; leave it out")
        if self.nonlinear is not None and (self.nonlinear.residual or self.nonlinear.smallest):
            raise RecipeError(
                f"saved nonlinear = {self.nonlinear}: expected one number an element and no limit of size, such as "
                "{format = 'e4m3fn', tile = '1x16', scale = 'absmax_bf16', flat = true}; a residual and `smallest` are "
                "for what an optimizer keeps"
            )

    def __str__(self) -> str:
        operands = ["inputs of products as the codes that they are rounded to"] * self.operands
        others = [] if self.nonlinear is None else [f"of norms, activations and gated products as {self.nonlinear}"]
        return "; ".join(operands + others)


COAT = Saved(
    operands=True,
    nonlinear=get_storage(
        Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 16), get_scaling("absmax_bf16"))), flat=True
    ),
)
"""COAT's mixed granularity: one scale a tensor for inputs of products, one for each 16 elements elsewhere.

Source: Xi et al. 2025, arXiv 2410.19313, and its released code.
"""
