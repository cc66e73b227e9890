"""Several optimizers as one: a rule for each parameter group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.optim.rules import rule_of
from halfstep.optim.rules.base import RULE, UpdateRule


class Combined(torch.optim.Optimizer):
    """Several of torch's optimizers as one, for `halfstep.prepare`: each goes on to update its own groups by its rule.

        halfstep.optim.Combined(torch.optim.Muon(matrices), torch.optim.AdamW(others))

    The groups are those of the optimizers given, in their order, and stay shared with them: schedulers on either work.
    Moments and step counts that they have are taken over.

    Raises:
        OptimizerError: there is none; one has no update rule; or two have the same parameter.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers:
            raise OptimizerError("Combined() was given no optimizer; expected at least one of torch.optim's")
        rules = [rule_of(optimizer) for optimizer in optimizers]
        owners: dict[Tensor, str] = {}
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
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers
        self.update_rule = combined({rule.name: rule for rule in rules})
        for optimizer in optimizers:
            self.state.update(optimizer.state)

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        """Steps are taken by what `halfstep.prepare` returns.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(
            "Combined describes an optimizer; hand it to halfstep.prepare(model, optimizer, recipe) and step the one "
            "that comes back (recipe 'fp32' for plain float32)"
        )


def combined(rules: Mapping[str, UpdateRule]) -> UpdateRule:
    """The rule that is, for each parameter group, the one of these that the group names."""

    return UpdateRule("+".join(rules), Combined, _unused, _unused, elementwise=False, parts=dict(rules))


def _unused(*_: Any) -> NoReturn:
    raise AssertionError("a group's own rule was not asked for")
