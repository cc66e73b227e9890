"""The update rules, one a file."""

import inspect
from collections import defaultdict
from functools import cache

import torch

from halfstep.errors import OptimizerError
from halfstep.optim.rules.base import RULE, Group, UpdateRule, update_rules


@cache
def moment_names() -> frozenset[str]:
    """The names of all moments of all update rules."""
    every: Group = defaultdict(lambda: 1)  # all options are on
    return frozenset(name for rule in update_rules().values() for name in rule.moments(every))


@cache
def stored_names() -> frozenset[str]:
    """The names under which recipes say how moments are kept (`UpdateRule.kept_as`)."""
    every: Group = defaultdict(lambda: 1)
    none: Group = defaultdict(int)
    rules = update_rules().values()
    found = {rule.kept_as(name, group) for rule in rules for name in rule.moments(every) for group in (every, none)}
    return frozenset(name for name in found if name is not None)


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """The rule with the same semantics as a torch optimizer: of its class, or of one that it is a subclass of and
    overrides nothing of but `__init__`.

    Raises:
        OptimizerError: the class has no counterpart, or is a subclass that does something else; or an option has none.
    """
    if isinstance(own := getattr(optimizer, RULE, None), UpdateRule):  # it combines several
        return own
    kind = type(optimizer)
    by_class = {rule.torch_class: rule for rule in update_rules().values()}
    stock = next(filter(by_class.__contains__, kind.__mro__), None)
    overridden = [] if stock in (None, kind) else _overridden(kind, stock)
    if stock is not None and not overridden:
        for group in optimizer.param_groups:
            by_class[stock].check(group)
        return by_class[stock]
    instead = next((_INSTEAD[base.__name__] for base in kind.__mro__ if base.__name__ in _INSTEAD), None)
    if overridden:
        assert stock is not None
        instead = (
            f"It is a {stock.__name__} that overrides {', '.join(overridden)}, and what that does would be left out. "
            f"Hand over a torch.optim.{stock.__name__}"
        )
    classes = [rule.torch_class for rule in update_rules().values()]
    known = ", ".join(f"{own.__module__.split('.')[0]}.optim.{own.__name__}" for own in classes)
    raise OptimizerError(
        f"{kind.__module__}.{kind.__qualname__} cannot be expressed as an update rule. "
        + (f"{instead}. " if instead else "")
        + f"Expected one of {known}; for another optimizer use halfstep.apply and LossScaler around it"
    )


_AROUND = (
    "call halfstep.apply(model, recipe) with a recipe of float32 weights ('bf16-mixed', 'fp16-mixed', 'fp8-current'), "
    "build it on model.parameters(), and step it in the loop, with halfstep.LossScaler where the recipe scales its loss"
)
_SEVERAL = "Make several optimizers one: halfstep.optim.Combined(*optimizers)"
_INSTEAD = {
    "list": _SEVERAL,
    "tuple": _SEVERAL,
    "Adafactor": (
        "It keeps row and column means in the place of second moments. For moments in little memory take "
        "torch.optim.AdamW under 'adamw-8bit' (2 bytes a parameter) or 'galore' (a subspace); for Adafactor "
        f"itself {_AROUND}"
    ),
    "Muon": f"Hand over torch.optim.Muon (torch 2.9 and newer); for this Muon itself {_AROUND}",
}
"""What works in the place of optimizers that people bring and no rule expresses, by name."""


class _Plain:
    """A class that is like any other: what this Python puts into each, such as 3.13's `__firstlineno__`."""

    annotated: int

    def __init__(self) -> None:
        self.annotated = 0


_OWN = {*vars(_Plain), "__qualname__", "__slots__"}
"""What a subclass may have of its own, and is no other optimizer for it."""


def _overridden(kind: type, stock: type) -> list[str]:
    """What a subclass has in the place of its base's, so that it may do anything."""
    between = kind.__mro__[: kind.__mro__.index(stock)]
    names = {name for base in between for name in vars(base) if hasattr(stock, name)} - _OWN
    # torch puts a profiled `step` into the class of the first instance: the stock one, wrapped.
    return sorted(
        name for name in names if inspect.unwrap(getattr(kind, name)) is not inspect.unwrap(getattr(stock, name))
    )
