"""A module's part of what was decided for its model: one record, at `module._halfstep`.

And the seeds of what a pass of a layer draws: a hash of the layer's key and of the numbers that the pass takes.

A pass that is computed again, by activation checkpointing of any kind, in another thread or in another process, takes
the same numbers and draws the same. Micro-batches, and calls of a layer that a model calls twice, take others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from halfstep.kernels.operator import seeds
from halfstep.quant.rounding import Seed
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul


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
    """Of the model itself: the recipe, and what the model was before (`nn.adopt`)."""
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


KEY = "noise"
"""Where a layer's states have its key: `kernels.operator`. Without one, torch's default generator is drawn from."""


ATTRIBUTE = "_halfstep_noise"
"""The buffer of a module that holds it."""


def key_of(module: nn.Module) -> Tensor | None:
    """A module's key; None where nothing is drawn, or no recipe is followed."""
    return module._buffers.get(ATTRIBUTE)


class Seeds(NamedTuple):
    """Those of one product: of its operands' noise, and of the signs of its Hadamard transform."""

    lhs: Seed | None = None
    rhs: Seed | None = None
    signs: Seed | None = None


def seeds_of(states: Mapping[str, Tensor] | None, x: Tensor, *products: Matmul) -> tuple[Seeds, ...]:
    """Those of each product of a pass that takes x: a forward's input, a backward's gradient."""
    key = None if states is None else states.get(KEY)
    if key is None or not any(product.draws for product in products):
        return (Seeds(),) * len(products)
    numbers = seeds(x, key, 3 * len(products))
    return tuple(Seeds(*numbers[3 * i : 3 * i + 3]) for i in range(len(products)))
