"""The Llamas of the training section, and their training step on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import halfstep
from halfstep.lab.models.llama import Llama
from halfstep.lab.task import VOCABULARY, Corpus


RECIPES = (
    "bf16-mixed", "fp8-current", "bf16-stochastic", "fp8-delayed", "fp8-rowwise", "fp8-block", "fp8lm-o2", "coat",
    "fp32",
)  # fmt: skip
"""bf16-mixed comes first, since the others are compared with it."""
RATE = 3e-4


@dataclass(frozen=True)
class Model:
    """A Llama's sizes, chosen so that every kind of FP8 GEMM supports its shapes."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    context: int
    needs: int = 0
    """The least GPU memory, in bytes, to train it."""


def stepping(
    device: torch.device,
    model: Model,
    recipe: str,
    corpus: Corpus,
    drawn_on: torch.device | None = None,
    graphed: bool = False,
) -> Callable[[], Tensor]:
    """A function that runs a training step on random windows of the corpus, and returns the loss, which stays on the
    device.

    Args:
        drawn_on: the device on which the weights are drawn from a fixed seed (default: `device`). Devices draw
            different numbers.
        graphed: capture the step in a CUDA graph, and replay it.
    """
    torch.manual_seed(0)
    with torch.device(drawn_on or device):
        network: torch.nn.Module = Llama(VOCABULARY, model.context, model.layers, model.width, model.heads)
    network = network.to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    network, optimizer, scaler = halfstep.prepare(network, optimizer, recipe, generator=0)
    drawn, highest = torch.Generator().manual_seed(0), len(corpus.train) - model.context

    def window() -> Tensor:
        starts = torch.randint(0, highest, (model.batch,), generator=drawn)
        return corpus.windows("train", starts, model.context + 1).to(device)

    def step(window: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    made = halfstep.GraphedStep(step, optimizer) if graphed else step
    return lambda: made(window())
