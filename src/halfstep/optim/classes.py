"""Optimizers to hand to `halfstep.prepare`: Lion and LAMB, which torch.optim lacks, and several combined as one."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import ParamsT

from halfstep.errors import OptimizerError
from halfstep.optim.rules import RULE, UpdateRule, rule_of


class Described(torch.optim.Optimizer):
    """A description of an optimizer, which does not step itself; `halfstep.prepare` makes the one that steps."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        for name in ("lr", "weight_decay", "eps"):
            if options.get(name, 0.0) < 0:
                raise OptimizerError(f"{name} = {options[name]} given; expected a number of at least 0")
        if not all(0 <= beta < 1 for beta in options.get("betas", ())):
            raise OptimizerError(f"betas = {options['betas']} given; expected two numbers in [0, 1)")
        super().__init__(params, options)

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        """Refused: the optimizer that `halfstep.prepare` returns steps.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(
            f"{type(self).__name__} describes an optimizer; hand it to halfstep.prepare(model, optimizer, recipe) "
            "and step the one that comes back (recipe 'fp32' for plain float32)"
        )


class Lion(Described):
    """Lion with torch.optim's interface (Chen et al. 2023, arXiv 2302.06675), for `halfstep.prepare`."""

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


class Lamb(Described):
    """LAMB with torch.optim's interface (You et al. 2019, arXiv 1904.00962), for `halfstep.prepare`."""

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


class Combined(Described):
    """Several of torch's optimizers as one, for `halfstep.prepare`: each updates its own groups by its own rule.

        halfstep.optim.Combined(torch.optim.Muon(matrices), torch.optim.AdamW(others))

    The parameter groups are those of the given optimizers, in order, and stay shared with them: schedulers on either
    work. Existing moments and step counts are taken over.

    Raises:
        OptimizerError: no optimizer is given; one has no update rule; or two have the same parameter.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers:
            raise OptimizerError("Combined() was given no optimizer; expected at least one of torch.optim's")
        rules = [rule_of(optimizer) for optimizer in optimizers]
        owners: dict[torch.Tensor, str] = {}
        for optimizer, rule in zip(optimizers, rules, strict=True):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in owners:
                        raise OptimizerError(
                            f"a parameter of shape {tuple(parameter.shape)} is in both {owners[parameter]} and "
                            f"{type(optimizer).__name__}: give each parameter to one of the optimizers"
                        )
                owners |= dict.fromkeys(group["params"], type(optimizer).__name__)
                group[RULE] = rule.name
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups])
        self.optimizers = optimizers
        self.update_rule = combined({rule.name: rule for rule in rules})
        for optimizer in optimizers:
            self.state.update(optimizer.state)


def combined(rules: Mapping[str, UpdateRule]) -> UpdateRule:
    """A rule that is, for each parameter group, the one of `rules` that the group names."""

    return UpdateRule("+".join(rules), Combined, _unused, _unused, elementwise=False, parts=dict(rules))


def _unused(*_: Any) -> NoReturn:
    raise AssertionError("a group's own rule was not asked for")
