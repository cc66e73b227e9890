"""The seeds of what a pass of a layer draws: a hash of the layer's key and of the numbers that the pass takes.

A pass that is computed again, by activation checkpointing of any kind, in another thread or in another process, takes
the same numbers and draws the same. Micro-batches, and calls of a layer that a model calls twice, take others.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from halfstep.kernels.seeds import seeds
from halfstep.quant.rounding import Seed
from halfstep.recipe import Matmul


KEY = "noise"
"""Where a layer's states have its key: `kernels.seeds`. Without one, torch's default generator is drawn from."""


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
