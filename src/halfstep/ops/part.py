"""`Part`, the record at `module._halfstep` of what a recipe decided for a module; and the seeds of its noise.

The seeds of a pass are a hash of the layer's key and of a sample of the values of its input or gradient. So a pass that
is computed again, by activation checkpointing of any kind, in another thread or process, draws the same noise, while
micro-batches, and several calls of one layer in a model, have other values and draw other noise.
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
    """The settings and state of a module in a model that follows a recipe. Copied and pickled with the module."""

    linear: LinearSpec | None = None
    """The quantizers and multipliers of the operands of the module's three matmuls."""
    attention: AttentionSpec | None = None
    """The quantizers of the operands of attention's two matmuls."""
    saved_codes: Any = None
    """The model's `ops.SavedCodes`, if tensors of this module are saved for backward in few bits."""
    stored: dict[str, Any] = field(default_factory=dict)
    """If quantized for inference, its weights by name: `nn.quantized_weights.Stored` if as codes, else `Weight`."""
    adapts: bool = False
    """Whether its input may require a gradient although the module is quantized for inference (adapters)."""
    origin: Any = None
    """The run's seed and the module's path, from which `nn.noise` makes its noise key (with the step count)."""
    stages: tuple[Any, ...] = ()
    """The module's settings in each stage of the recipe (`nn.stages`), if they differ."""
    stage: int = 0
    """The index of the stage in force."""
    following: Any = None
    """A record shared by all modules of the model, and the context of calls from outside its forward
    (`nn.following`)."""
    outside: bool = False
    """Whether it was called from outside the model's forward: checkpointing then recomputes it there too."""
    applied: Any = None
    """Only on the model itself: the recipe, and how to revert it (`nn.adopt`)."""
    reduction: Any = None
    """Only on the model itself: how gradients are reduced over ranks, if not as by torch (`halfstep.distributed`)."""
    agreed: bool = False
    """Only on the model itself: whether ranks were checked to have the same scaling states (`nn.ranks`)."""

    @property
    def spec(self) -> LinearSpec:
        """`linear`, for modules where it is set."""
        assert self.linear is not None
        return self.linear


NONE = Part()
"""The part of a module that follows no recipe."""


def part_of(module: Any) -> Part:
    """The module's part, to read; `NONE` if it follows no recipe."""
    return module.__dict__.get("_halfstep", NONE)  # type: ignore[no-any-return]


def own_part(module: Any) -> Part:
    """The module's part, to write to; created if missing."""
    return module.__dict__.setdefault("_halfstep", Part())  # type: ignore[no-any-return]


def parts_of(model: Any) -> Iterator[tuple[str, Any, Part]]:
    """(path, module, part) of each module of a model that has a part."""
    for path, module in model.named_modules():
        if (own := module.__dict__.get("_halfstep")) is not None:
            yield path, module, own


def drop_part(module: Any) -> None:
    """Remove the module's part."""
    module.__dict__.pop("_halfstep", None)


KEY = "noise"
"""The name of the noise key in a layer's states (see `kernels.operator.seeds`). Without a key, torch's default
generator is used."""


ATTRIBUTE = "_halfstep_noise"
"""The name of a module's buffer with its noise key."""


def key_of(module: nn.Module) -> Tensor | None:
    """A module's noise key; None if it draws no noise or follows no recipe."""
    return module._buffers.get(ATTRIBUTE)


class Seeds(NamedTuple):
    """The seeds of one matmul: of the noise of its two operands, and of the signs of its Hadamard transform."""

    lhs: Seed | None = None
    rhs: Seed | None = None
    signs: Seed | None = None


def seeds_of(states: Mapping[str, Tensor] | None, x: Tensor, *products: Matmul) -> tuple[Seeds, ...]:
    """The seeds of each matmul of a pass, hashed from the key in `states` and from x: a forward's input, a backward's
    gradient. All None without a key or noise."""
    key = None if states is None else states.get(KEY)
    if key is None or not any(product.draws for product in products):
        return (Seeds(),) * len(products)
    numbers = seeds(x, key, 3 * len(products))
    return tuple(Seeds(*numbers[3 * i : 3 * i + 3]) for i in range(len(products)))
