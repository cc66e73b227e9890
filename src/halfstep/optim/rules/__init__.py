"""The update rules, one a file."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.gpu.kinds import Options
from halfstep.quant.masters import Kept, Master
from halfstep.recipe import Storage
from halfstep.registry import collect


# ---- a step and its parts --------------------------------------------------------------------------------------------

Group = Mapping[str, Any]
"""A parameter group's options, as torch.optim names them."""

Moments = dict[str, Tensor]

RULE = "update_rule"
"""The option of a parameter group that names its rule, where an optimizer has several."""
CAPTURABLE = "capturable"
"""torch's option for steps in CUDA graphs: nothing is read on the host."""
ON_HOST = "on a CPU, and where no kernel does the whole update, it reads its step count on the host"
"""Why it is refused."""
REFUSED = {"differentiable": "the update runs without autograd", CAPTURABLE: ON_HOST}
"""Options that torch's optimizers have and rules have no counterpart of."""


@dataclass(frozen=True, eq=False)
class Step:
    """What one update of one weight takes: all of it is as stored, the gradient still times the loss scale."""

    weight: Tensor
    master: Master
    kept: Kept
    """What the master keeps."""
    grad: Tensor
    moments: Moments
    number: int
    """Counts from 1."""
    group: Group
    grad_scale: float = 1.0
    """What the gradient is multiplied by first."""
    kinds: Mapping[str, Storage] = field(default_factory=dict)
    """How the moments are kept, by name; `moments` holds the tensors of that."""
    coded: bool = False
    """Whether any of them is codes."""


Fused = Callable[[Tensor, Any, "int | None"], bool]
"""An update in one pass over memory, of tensors that stay where they are: the master's tensors follow the weight
(`Master.follow`), then weight, master and moments are updated in place, by a gradient, the numbers of the step
(`UpdateRule.numbers`) and the seed of stochastic rounding. False where it cannot take this gradient: nothing moved."""


def with_codes(tensors: Kept, kinds: Mapping[str, Storage], weight: Tensor) -> dict[str, Tensor | Coded]:
    """What is kept of a weight in these tensors, by name: what is codes with how it is coded."""
    numbers, codes = dict(tensors), {}
    for name, kind in kinds.items():
        for number, names in _names(kind, name):
            parts = dict(zip(names, map(numbers.pop, names.values()), strict=True))
            codes[number] = Coded(kind.quantizer, parts, kind.matrix(tuple(weight.shape)))
    return {**numbers, **codes}


@cache
def _names(kind: Storage, name: str) -> list[tuple[str, dict[str, str]]]:
    """The numbers that a moment is kept as, with what their parts are called; none where it is no codes."""
    return [(number, kind.names(number)) for number in kind.numbers(name)] if kind.dtype is None else []


def learning_rate(group: Group) -> float | Tensor:
    """A group's, which stays a tensor where reading it would wait for a GPU."""
    lr: Any = group["lr"]
    return lr if isinstance(lr, Tensor) and lr.is_cuda else float(lr)


def never(step: Step) -> Fused | None:
    """The fused update of a rule that has none."""
    return None


def _as_given(number: int, group: Group, grad_scale: float) -> Any:
    return number, group, grad_scale


# ---- update rules ----------------------------------------------------------------------------------------------------

Look = Callable[[Step, Callable[[], str]], None]
"""What a rule does with a gradient before any weight moves, given what to call the parameter in an error."""


def own_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a moment that is the weight's own."""
    return shape


def own_name(name: str, group: Group) -> str:
    """The name of a moment that recipes have a storage for under its own name."""
    return name


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """How a weight moves: `update(weight, grad, moments, step, group) -> (weight, moments)`, all in float32.

    `step` counts from 1. `moments` says, from a group's options, which moments there are; they start at zero.
    """

    name: str
    torch_class: type[torch.optim.Optimizer]
    """The optimizer of torch.optim with the same semantics and option names."""
    moments: Callable[[Group], tuple[str, ...]]
    update: Callable[[Tensor, Tensor, Moments, int, Group], tuple[Tensor, Moments]]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that, when true, have no counterpart here; with the reason."""
    refused_states: Mapping[str, str] = field(default_factory=dict)
    """States of the torch class that have no counterpart here; with the reason."""
    fused: Callable[[Step], Fused | None] = never
    """The fused update of a step's tensors; None where no kernel takes them."""
    numbers: Callable[[int, Group, float], Any] = _as_given
    """What `fused` is given of a step: from its number, a group's options and what gradients are multiplied by."""
    elementwise: bool = True
    """Whether an element moves by its own gradient and moments alone (not so where norms of tensors enter)."""
    decay: Callable[[Group], tuple[float, float]] | None = None
    """What of a weight is added to its gradient, and what the weight is multiplied by; the rest of a step depends
    on gradients alone. None where it does not, so that it cannot be taken in a subspace."""
    shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = own_shape
    """The shape of a moment of that name, of a weight of that shape."""
    kept_as: Callable[[str, Group], str | None] = own_name
    """The name under which recipes say how a moment is kept: Adam's for one that is alike; None keeps it in float32."""
    options: Callable[[Group], Options] | None = None
    """A group's options for the kernels that step many tensors on a GPU together; None where none know the rule."""
    look: Look | None = None
    lower: Callable[[Step], Tensor] | None = None
    """The gradient in fewer numbers, of which `update` takes the sum over micro-batches as well."""
    dims: int | None = None
    """How many dimensions parameters must have; None where it takes any."""
    refusal: Callable[[Group], str | None] | None = None
    """What is wrong with a group's options, as found and expected; None where nothing is."""
    parts: Mapping[str, UpdateRule] = field(default_factory=dict)
    """Where each group has a rule of its own (`of`), which they are, by name."""

    def of(self, group: Group) -> UpdateRule:
        """The rule of a group: this one, or the one of `parts` that the group names.

        Raises:
            OptimizerError: it names none of them.
        """
        if not self.parts:
            return self
        name: Any = group.get(RULE)
        if name not in self.parts:
            raise OptimizerError(
                f"a parameter group of this {self.name} has {RULE} = {name!r}; expected one of "
                f"{', '.join(map(repr, self.parts))}: let the group name the rule of its parameters"
            )
        return self.parts[name]

    def advance(self, step: Step) -> bool:
        """Take the fused update, once; False where there is none, and nothing moved."""
        fused = self.fused(step)
        return fused is not None and fused(
            step.grad, self.numbers(step.number, step.group, step.grad_scale), step.master.seed
        )

    def check(self, group: Group) -> None:
        """Refuse options that have no counterpart here.

        Raises:
            OptimizerError: one is set.
        """
        if self.parts:
            self.of(group).check(group)
            return
        for option, reason in self.refused.items():
            if group.get(option) and not (option == CAPTURABLE and self._counts_on_gpu(group)):
                raise OptimizerError(
                    f"{self.torch_class.__name__} with {option}={group[option]!r} cannot be expressed: {reason}. "
                    f"Build it with {option}={type(group[option])()!r}"
                )
        if self.refusal is not None and (why := self.refusal(group)) is not None:
            raise OptimizerError(f"{self.torch_class.__name__}: {why}")
        if self.dims is not None:
            other = next((p for p in group.get("params", ()) if p.dim() != self.dims), None)
            if other is not None:
                name = self.torch_class.__name__
                raise OptimizerError(
                    f"{name} was given a parameter of shape {tuple(other.shape)}; expected {self.dims} dimensions. "
                    f"Give the others to AdamW: halfstep.optim.Combined(torch.optim.{name}(matrices), "
                    "torch.optim.AdamW(others))"
                )

    def _counts_on_gpu(self, group: Group) -> bool:
        """Whether kernels count the steps of all its parameters."""
        parameters = group.get("params", ())
        return self.options is not None and bool(parameters) and all(p.is_cuda for p in parameters)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A rule travels by its name: its functions have none that a pickle could find them by."""
        return (_named, (self.name,)) if update_rules().get(self.name) is self else super().__reduce_ex__(protocol)


def _named(name: str) -> UpdateRule:
    return update_rules()[name]


@cache
def update_rules() -> dict[str, UpdateRule]:
    """Every update rule, by name."""
    return collect("halfstep.optim.rules", UpdateRule)


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


# ---- rules of torch's optimizers -------------------------------------------------------------------------------------


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
