"""A rule of a recipe: which layers it means, and how they round their products."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.recipe.blocks import check_blocks
from halfstep.recipe.products import LinearSpec


@dataclass(frozen=True)
class Rule:
    """Layers whose module path matches the glob `path` round their products as `linear` says; the first match wins.
    Several globs are separated by `|`: `*.q_proj|*.k_proj`.

    Linear, convolutional and recurrent ones, and attention's projections: `nn.layers.KINDS`. With a `role` only those
    whose weight has it (`halfstep.unit`): `readout`, `input` ..., or `branch_end`, the last of a residual branch. With
    `blocks` only those in some of the model's repeated blocks, by depth (`nn.blocks`): `first 2`, `last 15%`, `first 1,
    last 2`.

    A rule that matches no layer is an error, unless it is `optional`. A rule whose spec rounds nothing keeps its
    layers in the recipe's compute dtype; `why` then says why.
    """

    path: str
    linear: LinearSpec
    optional: bool = False
    why: str = ""
    role: str | None = None
    blocks: str | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None:
            check_blocks(self.blocks)

    @property
    def where(self) -> str:
        """Path, role and blocks, in words."""
        role = "" if self.role is None else f" with role {self.role}"
        return self.path.replace("|", ", ") + role + ("" if self.blocks is None else f" in blocks {self.blocks}")
