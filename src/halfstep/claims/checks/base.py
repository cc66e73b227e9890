"""The base of checks: a check has a name, its claim's id, and a function that measures."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import halfstep
from halfstep.errors import ClaimError, one_of
from halfstep.optim import LossScaler, LowBit
from halfstep.recipe import DTYPES, get_recipe
from halfstep.registry import family


Numbers = dict[str, float]
"""A check's figures, by the names that the ledger's row gives them."""

Choose = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Check:
    """One computation of the ledger. It gives the same figures every time: random parts have fixed seeds."""

    name: str
    measure: Callable[[], Numbers]


def check(name: str) -> Callable[[Callable[[], Numbers]], Check]:
    """A decorator that makes a check of a function."""
    return lambda measure: Check(name, measure)


checks = family("halfstep.claims.checks", Check)
"""All checks by name, which are the ids of their claims."""


def get_check(name: str) -> Check:
    """The check of that name.

    Raises:
        ClaimError: no check has that name; the message suggests the nearest ones.
    """
    return checks()[one_of("check", name, checks(), ClaimError)]


def one_weight(recipe: str, values: Tensor, choose: Choose, seed: int = 0) -> tuple[nn.Parameter, LowBit]:
    """A parameter with these float32 values as the only weight of a model, prepared for a recipe, and its optimizer."""
    model = nn.Module()
    weight = nn.Parameter(values.clone())
    model.register_parameter("weight", weight)
    _, optimizer, _ = halfstep.prepare(model, choose([weight]), recipe, generator=seed)
    optimizer.awaits_scaler = False  # checks set gradients by hand
    return weight, optimizer


def stepped(recipe: str, count: int, choose: Choose, grad: float, steps: int) -> tuple[nn.Parameter, LowBit]:
    """`one_weight` of `count` ones, after `steps` steps with the same gradient everywhere."""
    weight, optimizer = one_weight(recipe, torch.ones(count, dtype=torch.float32, device="cpu"), choose)
    weight.grad = torch.full_like(weight, grad)
    for _ in range(steps):
        optimizer.step()
    return weight, optimizer


def update(optimizer: LowBit, scaler: LossScaler) -> None:
    """One step of a training loop, after which the gradients are dropped."""
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Float32 samples of N(0, 1), the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def grad_dtype(recipe: str) -> torch.dtype:
    """The dtype in which a recipe accumulates gradients."""
    return DTYPES[get_recipe(recipe).grad_format]
