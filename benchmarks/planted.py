"""Small GPTs in which something goes wrong at a known step: `halfstep sweep --grid model=benchmarks/planted.py:...`.

A step is counted by forwards of the model in training: runs must not be resumed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from halfstep.lab.models.gpt import GPT


FACTOR = 64.0
OFTEN, SELDOM, ONCE = range(61, 200, 12), range(61, 200, 60), (121,)


class Planted(GPT):
    """`gpt-nano`, which knows the step it is in."""

    def __init__(self) -> None:
        super().__init__(256, 64, 2, 32, 2)
        self.step = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """As the GPT's; in training it counts."""
        self.step += self.training
        return super().forward(tokens)

    def due(self, steps: Collection[int]) -> bool:
        """Whether something is to go wrong now."""
        return self.training and self.step in steps


def none() -> nn.Module:
    """Nothing goes wrong."""
    return Planted()


def often() -> nn.Module:
    """In one step of 12 from 61 on the amaxes of all layers' inputs jump, but the head's."""
    model = Planted()
    return _jumping(model, OFTEN, [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)])


def seldom() -> nn.Module:
    """The same in one step of 60."""
    model = Planted()
    return _jumping(model, SELDOM, [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)])


def one() -> nn.Module:
    """As `seldom`, of one layer: the second block's last."""
    model = Planted()
    return _jumping(model, SELDOM, [layer for layer in model.blocks[1].modules() if isinstance(layer, nn.Linear)][-1:])


def weight() -> nn.Module:
    """In step 121 the last norm's weight is 64 times what it was, and it stays so."""
    model = Planted()

    def multiply(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if model.due(ONCE):
            with torch.no_grad():
                model.norm.weight.mul_(FACTOR)

    model.norm.register_forward_pre_hook(multiply)
    return model


def batch() -> nn.Module:
    """In step 121 the tokens are noise: the loss spikes, and no tensor is the cause."""
    model = Planted()

    def noise(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].flip(-1).roll(1, 0),) if model.due(ONCE) else args

    model.token.register_forward_pre_hook(noise)
    return model


def _jumping(model: Planted, steps: Collection[int], layers: Sequence[nn.Linear]) -> nn.Module:
    """Layers' inputs are multiplied and their outputs divided: the function stays what it is, and the amaxes jump."""

    def before(layer: nn.Linear, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * FACTOR,) if model.due(steps) else args

    def after(layer: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        bias = layer.bias  # which is not part of what was multiplied
        return (output - bias) / FACTOR + bias if model.due(steps) else output

    for layer in layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    return model
