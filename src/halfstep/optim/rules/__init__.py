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
"""The option of a parameter group that names its rule, if an optimizer has several."""
CAPTURABLE = "capturable"
"""torch's option for steps in CUDA graphs: the host reads nothing."""
ON_HOST = "on a CPU, and where no kernel does the whole update, it reads its step count on the host"
"""The reason why `capturable` is refused."""
REFUSED = {"differentiable": "the update runs without autograd", CAPTURABLE: ON_HOST}
"""Options of torch's optimizers that rules do not support, with the reason."""


@dataclass(frozen=True, eq=False)
class Step:
    """The arguments of one update of one weight: tensors as they are stored, and the gradient as it is."""

    weight: Tensor
    master: Master
    kept: Kept
    """The master's tensors."""
    grad: Tensor
    moments: Moments
    number: int
    """The step's number, from 1."""
    group: Group
    grad_scale: float = 1.0
    """The factor by which the gradient is multiplied first (1 / loss scale)."""
    kinds: Mapping[str, Storage] = field(default_factory=dict)
    """The storages of the moments, by name; `moments` has their tensors."""
    coded: bool = False
    """Whether any moment is stored as codes."""


Fused = Callable[[Tensor, Any, "int | None"], bool]
"""fused(grad, numbers, seed): an update in one pass over memory, prepared for fixed tensors. The master follows the
weight (`Master.follow`), then weight, master and moments are updated in place. `numbers` are the step's scalars
(`UpdateRule.numbers`), `seed` is for stochastic rounding. False, with nothing changed, if it cannot take `grad`."""


def with_codes(tensors: Kept, kinds: Mapping[str, Storage], weight: Tensor) -> dict[str, Tensor | Coded]:
    """The tensors of moments or masters by name, with those of codes and scales combined to `Coded`."""
    numbers, codes = dict(tensors), {}
    for name, kind in kinds.items():
        for number, names in _names(kind, name):
            parts = dict(zip(names, map(numbers.pop, names.values()), strict=True))
            codes[number] = Coded(kind.quantizer, parts, kind.matrix(tuple(weight.shape)))
    return {**numbers, **codes}


@cache
def _names(kind: Storage, name: str) -> list[tuple[str, dict[str, str]]]:
    """For each of the one or two values that a moment is stored as, its name and the names of its codes and scales;
    empty if the storage uses no codes."""
    return [(number, kind.names(number)) for number in kind.numbers(name)] if kind.dtype is None else []


def learning_rate(group: Group) -> float | Tensor:
    """A group's learning rate as a float; a tensor on a GPU is returned as it is, since the host would have to wait."""
    lr: Any = group["lr"]
    return lr if isinstance(lr, Tensor) and lr.is_cuda else float(lr)


def no_fused_update(step: Step) -> Fused | None:
    """`UpdateRule.fused` of a rule without a fused update: None."""
    return None


def _as_given(number: int, group: Group, grad_scale: float) -> Any:
    return number, group, grad_scale


# ---- update rules ----------------------------------------------------------------------------------------------------

Look = Callable[[Step, Callable[[], str]], None]
"""look(step, namer): reads a gradient before any weight is updated; `namer()` is the parameter's name for errors."""


def own_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`UpdateRule.shape` for moments of the weight's shape."""
    return shape


def own_name(name: str, group: Group) -> str:
    """`UpdateRule.kept_as` for moments that recipes know by their own name."""
    return name


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """How a weight is updated: `update(weight, grad, moments, step, group) -> (weight, moments)`, all in float32.

    `step` counts from 1. `moments(group)` returns the names of the moments, which start at zero.
    """

    name: str
    torch_class: type[torch.optim.Optimizer]
    """The optimizer of torch.optim with the same semantics and option names."""
    moments: Callable[[Group], tuple[str, ...]]
    update: Callable[[Tensor, Tensor, Moments, int, Group], tuple[Tensor, Moments]]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that are not supported if true, with the reason."""
    refused_states: Mapping[str, str] = field(default_factory=dict)
    """States of the torch class that are not supported, with the reason."""
    fused: Callable[[Step], Fused | None] = no_fused_update
    """fused(step): a fused update for the step's tensors; None if no kernel takes them."""
    numbers: Callable[[int, Group, float], Any] = _as_given
    """numbers(step number, group, grad_scale): the scalars of a step for `fused`."""
    elementwise: bool = True
    """Whether each element's update depends on its own gradient and moments alone, not on norms of tensors."""
    decay: Callable[[Group], tuple[float, float]] | None = None
    """decay(group): the factor of the weight that is added to its gradient, and the factor by which the weight is
    multiplied; the rest of the step depends on gradients alone. None if it does not: the rule cannot be projected."""
    shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = own_shape
    """shape(name, weight's shape): the shape of a moment."""
    kept_as: Callable[[str, Group], str | None] = own_name
    """kept_as(name, group): the name under which recipes choose a moment's storage, such as that of Adam's similar
    moment; None: float32."""
    options: Callable[[Group], Options] | None = None
    """options(group): options for the kernels that step many tensors on a GPU together; None if none support the
    rule."""
    look: Look | None = None
    lower: Callable[[Step], Tensor] | None = None
    """lower(step): the gradient projected to its subspace; `update` also takes a sum of such over micro-batches."""
    dims: int | None = None
    """The number of dimensions that parameters must have; None: any."""
    refusal: Callable[[Group], str | None] | None = None
    """refusal(group): an error message for invalid options; None if they are valid."""
    parts: Mapping[str, UpdateRule] = field(default_factory=dict)
    """For an optimizer that combines several rules: these rules, by name."""

    def of(self, group: Group) -> UpdateRule:
        """The rule of a group: this one, or the one of `parts` that the group names.

        Raises:
            OptimizerError: the group names none of them.
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
        """Run the fused update of a step; False, with nothing changed, if there is none."""
        fused = self.fused(step)
        return fused is not None and fused(
            step.grad, self.numbers(step.number, step.group, step.grad_scale), step.master.seed
        )

    def check(self, group: Group) -> None:
        """Check that a group's options are supported.

        Raises:
            OptimizerError: one is not.
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
        """Whether GPU kernels can step all parameters of the group, so that step counts are on the GPU."""
        parameters = group.get("params", ())
        return self.options is not None and bool(parameters) and all(p.is_cuda for p in parameters)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a rule by its name, since its functions cannot be pickled."""
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
    """The names under which recipes choose the storage of moments (`UpdateRule.kept_as`)."""
    every: Group = defaultdict(lambda: 1)
    none: Group = defaultdict(int)
    rules = update_rules().values()
    found = {rule.kept_as(name, group) for rule in rules for name in rule.moments(every) for group in (every, none)}
    return frozenset(name for name in found if name is not None)


# ---- rules of torch's optimizers -------------------------------------------------------------------------------------


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """The rule with the semantics of a torch optimizer: that of its class, or of a base class of which it overrides
    only `__init__`.

    Raises:
        OptimizerError: there is no such rule; the class overrides other methods; or an option is not supported.
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
    "Muon": f"Hand over torch.optim.Muon; for this Muon itself {_AROUND}",
}
"""Advice for common optimizers without a rule, by class name."""


class _Plain:
    """A minimal class, to list the attributes that this Python puts into every class, such as 3.13's
    `__firstlineno__`."""

    annotated: int

    def __init__(self) -> None:
        self.annotated = 0


_OWN = {*vars(_Plain), "__qualname__", "__slots__"}
"""Attributes that a subclass may define without counting as an override."""


def _overridden(kind: type, stock: type) -> list[str]:
    """The names of attributes of `stock` that a subclass overrides."""
    between = kind.__mro__[: kind.__mro__.index(stock)]
    names = {name for base in between for name in vars(base) if hasattr(stock, name)} - _OWN
    # torch puts a profiled `step` into the class of the first instance: the stock one, wrapped.
    return sorted(
        name for name in names if inspect.unwrap(getattr(kind, name)) is not inspect.unwrap(getattr(stock, name))
    )
