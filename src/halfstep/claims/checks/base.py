"""What a check is: a name, which is its claim's id, and a function that measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import halfstep
from halfstep.optim import LowBit
from halfstep.recipe import DTYPES, get_recipe


Numbers = dict[str, float]
"""What a check measured, by the names that the ledger's row gives its numbers."""

Choose = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Check:
    """One computation of the ledger. The same numbers every time: what is random has a fixed seed."""

    name: str
    measure: Callable[[], Numbers]


def check(name: str) -> Callable[[Callable[[], Numbers]], Check]:
    """Make a check of the function below it."""
    return lambda measure: Check(name, measure)


def one_weight(recipe: str, values: Tensor, choose: Choose, seed: int = 0) -> tuple[nn.Parameter, LowBit]:
    """A model that is a single weight with these float32 values, prepared for a recipe, and its optimizer."""
    model = nn.Module()
    weight = nn.Parameter(values.clone())
    model.register_parameter("weight", weight)
    _, optimizer, _ = halfstep.prepare(model, choose([weight]), recipe, generator=seed)
    optimizer.awaits_scaler = False  # checks set gradients by hand
    return weight, optimizer


def grad_dtype(recipe: str) -> torch.dtype:
    """The dtype in which a recipe accumulates gradients."""
    return DTYPES[get_recipe(recipe).grad_format]
