"""A module's part of what was decided for its model: one record, at `module._halfstep`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from halfstep.recipe import AttentionSpec, LinearSpec


@dataclass
class Part:
    """What a module of a model that follows a recipe computes by. Copies and pickles of the module carry it along."""

    linear: LinearSpec | None = None
    """How its matmuls round their operands, and what they are multiplied by."""
    attention: AttentionSpec | None = None
    """How attention's two matmuls do."""
    keeping: Any = None
    """The `ops.Keeping` of its model, where autograd saves something of the module in few bits."""
    stored: dict[str, Any] = field(default_factory=dict)
    """How its weights were quantized for inference, by name."""
    adapts: bool = False
    """Whether its input may require a gradient though it is quantized."""
    origin: Any = None
    """What its key of noise is made of, beside the steps (`nn.noise`)."""
    stages: tuple[Any, ...] = ()
    """What it takes in each stage of the recipe (`nn.stages`), where they differ."""
    stage: int = 0
    """Which of them is in force."""
    following: Any = None
    """What all modules of its model share: what a call from outside the model's forward enters (`nn.following`)."""
    outside: bool = False
    """Whether it was called from outside the model's forward: again, where that is computed again (checkpointing)."""
    applied: Any = None
    """Of the model itself: the recipe, and what the model was before (`nn.applied`)."""
    reduction: Any = None
    """Of the model itself: how its gradients cross from rank to rank, where not as torch has it
    (`halfstep.distributed`)."""
    agreed: bool = False
    """Of the model itself: whether the ranks were found to keep the same scaling states (`nn.ranks`)."""

    @property
    def spec(self) -> LinearSpec:
        """`linear`, of a layer that has it."""
        assert self.linear is not None
        return self.linear


NONE = Part()
"""That of a module that follows no recipe."""


def part_of(module: Any) -> Part:
    """The module's part; `NONE`, which is not to be written to, where it follows no recipe."""
    return module.__dict__.get("_halfstep", NONE)  # type: ignore[no-any-return]


def own_part(module: Any) -> Part:
    """The module's part, to write to."""
    return module.__dict__.setdefault("_halfstep", Part())  # type: ignore[no-any-return]


def parts_of(model: Any) -> Iterator[tuple[str, Any, Part]]:
    """The modules of a model that have one, by path."""
    for path, module in model.named_modules():
        if (own := module.__dict__.get("_halfstep")) is not None:
            yield path, module, own


def drop_part(module: Any) -> None:
    """Take it away."""
    module.__dict__.pop("_halfstep", None)
