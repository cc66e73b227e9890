"""Small GPTs with a fault planted at a known step: `halfstep sweep --grid model=benchmarks/planted.py:...`.

Steps are counted by the model's forwards in training mode, so runs must not be resumed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from halfstep.lab.models.gpt import GPT


FACTOR = 64.0
OFTEN, SELDOM, ONCE = range(61, 200, 12), range(61, 200, 60), (121,)


class Planted(GPT):
    """`gpt-nano` with a counter of its training steps."""

    def __init__(self) -> None:
        super().__init__(256, 64, 2, 32, 2)
        self.step = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """The GPT's forward; in training mode it counts a step."""
        self.step += self.training
        return super().forward(tokens)

    def due(self, steps: Collection[int]) -> bool:
        """Whether the fault occurs in this step."""
        return self.training and self.step in steps


def none() -> nn.Module:
    """A model without a fault."""
    return Planted()


def often() -> nn.Module:
    """A model in which the amaxes of the inputs of all layers but the head jump in one step of 12 from step 61 on."""
    model = Planted()
    return _jumping(model, OFTEN, [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)])


def seldom() -> nn.Module:
    """As `often`, in one step of 60."""
    model = Planted()
    return _jumping(model, SELDOM, [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)])


def one() -> nn.Module:
    """As `seldom`, in one layer: the last of the second block."""
    model = Planted()
    return _jumping(model, SELDOM, [layer for layer in model.blocks[1].modules() if isinstance(layer, nn.Linear)][-1:])


def weight() -> nn.Module:
    """A model whose last norm's weight is multiplied by 64 in step 121, for good."""
    model = Planted()

    def multiply(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if model.due(ONCE):
            with torch.no_grad():
                model.norm.weight.mul_(FACTOR)

    model.norm.register_forward_pre_hook(multiply)
    return model


def batch() -> nn.Module:
    """A model whose tokens in step 121 are noise: the loss spikes without a tensor as the cause."""
    model = Planted()

    def noise(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].flip(-1).roll(1, 0),) if model.due(ONCE) else args

    model.token.register_forward_pre_hook(noise)
    return model


def _jumping(model: Planted, steps: Collection[int], layers: Sequence[nn.Linear]) -> nn.Module:
    """The model with the inputs of layers multiplied and their outputs divided in some steps: the function is
    unchanged, but the amaxes jump."""

    def before(layer: nn.Linear, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * FACTOR,) if model.due(steps) else args

    def after(layer: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        bias = layer.bias  # which is not part of what was multiplied
        return (output - bias) / FACTOR + bias if model.due(steps) else output

    for layer in layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    return model
