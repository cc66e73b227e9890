"""Weights of unit size: each divided by its own standard deviation, once; and multiplied back."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.unit.part import unit_part


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


def plain_ones(model: nn.Module, divided: Divided) -> list[str]:
    """The weights that are nearer in size to what they were divided by than to 1, where those two are far apart."""
    parameters = dict(model.named_parameters())
    found = []
    for name, deviation in divided.weights.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.is_meta or 0.5 < deviation < 2:
            continue
        size = float(parameter.detach().double().std(correction=0))
        if 0 < size < math.inf and abs(math.log(size / deviation)) < abs(math.log(size)):
            found.append(name)
    return found


@dataclass(frozen=True)
class Loading:
    """The members of a root that says so where it was given the weights of a model that is not unit-scaled."""

    beneath: bool = True

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        load: Any = stock.load_state_dict

        def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            loaded, divided = load(module, *args, **kwargs), unit_part(module).scaled.divided
            if plain := plain_ones(module, divided):
                warnings.warn(
                    f"{type(module).__name__} is unit-scaled, and {len(plain)} of its {len(divided.weights)} "
                    f"weights ({plain[0]} ...) were loaded in the size that they had before: a state dict of a model "
                    "that is not unit-scaled? With such weights it computes something else. Load them first "
                    "(halfstep.revert(model) undoes unit_scale), then call unit_scale",
                    stacklevel=2,
                )
            return loaded

        return {"load_state_dict": load_state_dict}
