"""Optimizers that torch.optim lacks, to hand to `halfstep.prepare`: groups and options, in torch's manner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from halfstep.errors import OptimizerError


class _Described(torch.optim.Optimizer):
    """Says what is to be optimised and how; `halfstep.prepare` makes the optimizer that steps."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        for name in ("lr", "weight_decay", "eps"):
            if options.get(name, 0.0) < 0:
                raise OptimizerError(f"{name} = {options[name]} given; expected a number of at least 0")
        if not all(0 <= beta < 1 for beta in options["betas"]):
            raise OptimizerError(f"betas = {options['betas']} given; expected two numbers in [0, 1)")
        super().__init__(params, options)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Steps are taken by what `halfstep.prepare` returns.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(
            f"{type(self).__name__} describes an optimizer; hand it to halfstep.prepare(model, optimizer, recipe) "
            "and step the one that comes back (recipe 'fp32' for plain float32)"
        )


class Lion(_Described):
    """Lion's options (Chen et al. 2023, arXiv 2302.06675)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)


class Lamb(_Described):
    """LAMB's options (You et al. 2019, arXiv 1904.00962)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
