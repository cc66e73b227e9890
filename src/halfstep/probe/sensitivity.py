"""How far float32 differs from itself when its weights move by one rounding: no recipe can be asked to agree better."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn

from halfstep.probe.batch import Batch, Loss
from halfstep.probe.trial import GRADIENT_ERROR, OUTPUT_ERROR, Reference, Run


_SEED = 0x5EED  # not one that initialises weights: noise must not repeat them

FLOAT32 = 2.0**-23
"""float32's own rounding: by it, or half of it, the order of a sum moves every result."""


@dataclass(frozen=True)
class Sensitivity:
    """The model in float32 with each weight w made w (1 + size u), u uniform in [-1, 1], beside the model as it is."""

    size: float
    output_error: float
    """The relative error of the output on the first batch, as `Trial.output_error`."""
    gradient_errors: dict[str, float]
    """The relative error of each gradient that a trial compares."""

    @property
    def unstable(self) -> frozenset[str]:
        """The parameters whose gradients differ by more than passes."""
        return frozenset(name for name, error in self.gradient_errors.items() if not error <= GRADIENT_ERROR)

    @property
    def output_is_stable(self) -> bool:
        """Whether the output differs by no more than passes."""
        return self.output_error <= OUTPUT_ERROR


def sensitivity(model: nn.Module, batch: Batch, loss: Loss | None, expected: Reference, size: float) -> Sensitivity:
    """What a relative perturbation of all weights does to the first batch; a copy of the model is perturbed."""
    moved = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                uniform = 2 * torch.rand(parameter.shape, generator=noise, dtype=torch.float32, device="cpu") - 1
                parameter.mul_(1 + size * uniform.to(parameter.device))
    run = Run(moved, loss, expected)
    run.step(batch, 1.0, compare=True)
    compared = {name: error for name, error in run.gradient_errors.items() if expected.counts(name)}
    return Sensitivity(size, run.outputs.by_module.get("", math.inf), compared)
