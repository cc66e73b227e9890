"""The update rules, one a file."""

from functools import cache

import torch

from halfstep.errors import OptimizerError
from halfstep.optim.rules.base import UpdateRule
from halfstep.registry import collect


@cache
def update_rules() -> dict[str, UpdateRule]:
    """Every update rule, by name."""
    return collect("halfstep.optim.rules", UpdateRule)


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """The rule with the same semantics as a torch optimizer.

    Raises:
        OptimizerError: the class has no counterpart (a subclass may do anything), or an option has none.
    """
    for rule in update_rules().values():
        if type(optimizer) is rule.torch_class:
            for group in optimizer.param_groups:
                rule.check(group)
            return rule
    known = ", ".join(_public_name(rule.torch_class) for rule in update_rules().values())
    raise OptimizerError(
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__} cannot be expressed as an update rule. "
        f"Expected one of {known}; for another optimizer use halfstep.apply and LossScaler around it"
    )


def _public_name(kind: type) -> str:
    return f"{kind.__module__.split('.')[0]}.optim.{kind.__name__}"
