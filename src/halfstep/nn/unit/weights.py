"""Weights of unit size: each divided by its own standard deviation, once; and multiplied back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError


@dataclass(frozen=True)
class Divided:
    """What was done to the parameters, so that it can be undone."""

    weights: dict[str, float]
    """What each weight was divided by."""
    vectors: dict[str, Tensor]
    """What was taken from each bias, gain or vector that did not begin at 0 or 1."""


def standard_deviations(parameters: dict[str, nn.Parameter], name: str) -> dict[str, float]:
    """The standard deviation of each weight.

    Raises:
        ModelError: a weight has none to divide by, or is not finite.
    """
    found = {}
    for path, parameter in parameters.items():
        deviation = float(parameter.detach().double().std(correction=0))
        if not 0 < deviation < float("inf"):
            raise ModelError(
                f"{name}: {path} {tuple(parameter.shape)} has a standard deviation of {deviation}; expected a weight "
                "initialised at random, which unit_scale divides by it. Initialise it (torch.nn.init.normal_) first; "
                "nothing was changed"
            )
        found[path] = deviation
    return found


@torch.no_grad()
def divide(model: nn.Module, deviations: dict[str, float], vectors: dict[str, float]) -> Divided:
    """Divide each weight, and set each vector to its number; say what it takes to undo it."""
    parameters = dict(model.named_parameters())
    taken: dict[str, Tensor] = {}
    for name, value in vectors.items():
        parameter = parameters[name]
        if not bool((parameter == value).all()):
            taken[name] = parameter.detach() - value
            parameter.fill_(value)
    for name, deviation in deviations.items():
        parameters[name].div_(deviation)
    return Divided(deviations, taken)


@torch.no_grad()
def multiply(model: nn.Module, divided: Divided) -> None:
    """Undo `divide`: a weight comes back within one rounding of its dtype, exactly where it is a power of two."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, deviation in divided.weights.items():
        if name in parameters:
            parameters[name].mul_(deviation)
    for name, offset in divided.vectors.items():
        if name in parameters:
            parameters[name].add_(offset.to(parameters[name].device))
