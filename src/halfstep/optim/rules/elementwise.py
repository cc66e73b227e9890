"""Update rules as a formula of one element, which is the reference on torch tensors and is traced to kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.kernels.arithmetic import Program, traced
from halfstep.kernels.cpu import optimizer
from halfstep.kernels.gpu.kinds import Options
from halfstep.optim.rules import (
    Fused,
    Group,
    Moments,
    Step,
    UpdateRule,
    own_shape,
    with_codes,
)


Element = Callable[[Any, Any, Mapping[str, Any], Any], tuple[Any, dict[str, Any]]]
ByStep = Callable[[int, Group], Mapping[str, float]]


def nothing(step: int, group: Group) -> Mapping[str, float]:
    """`by_step` of a formula that needs no scalars of the step."""
    return {}


def elementwise(
    name: str,
    torch_class: type[torch.optim.Optimizer],
    moments: Callable[[Group], tuple[str, ...]],
    element: Element,
    given: Callable[[Group], Mapping[str, Any]],
    by_step: ByStep = nothing,
    shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = own_shape,
    **more: Any,
) -> UpdateRule:
    """The update rule of a formula `element(weight, grad, moments, o) -> (weight, moments)`, which kernels run in one
    pass.

    A formula uses Python's operators and the functions of `halfstep.kernels.arithmetic`. It may branch on options that
    are None, True or False, but not on scalars. With `maximize`, the gradient is passed negated. A formula with a norm
    of the whole tensor needs elementwise=False; a read-only pass computes norms first.

    Args:
        moments, shape, more: as for `UpdateRule`. A moment of shape () is passed as one scalar for all elements.
        given: given(group): the options in `o`: scalars, and None, True or False, which kernels are compiled for.
        by_step: by_step(step, group): further scalars in `o`, which must be constant from some step on.
    """
    formula = Formula(moments, element, given, by_step, shape, more.get("elementwise", True))
    return UpdateRule(
        name, torch_class, moments, formula.update, fused=formula.fused, numbers=formula.numbers,
        options=formula.on_gpu, shape=shape, **more,
    )  # fmt: skip


@dataclass(frozen=True)
class Formula:
    """The formula of a rule with its options, and the functions of the `UpdateRule` made from it."""

    moments: Callable[[Group], tuple[str, ...]]
    element: Element
    options: Callable[[Group], Mapping[str, Any]]
    by_step: ByStep
    shape: Callable[[str, tuple[int, ...]], tuple[int, ...]]
    elementwise: bool

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, step: int, group: Group) -> tuple[Tensor, Moments]:
        """`UpdateRule.update`: the formula on torch tensors."""
        given = {name: float(o) if isinstance(o, Tensor) else o for name, o in self.options(group).items()}
        given |= {"step": float(step), **self.by_step(step, group)}
        return self.element(weight, -grad if group.get("maximize") else grad, moments, SimpleNamespace(**given))

    def program(self, group: Group, options: Mapping[str, Any], by_step: Mapping[str, float]) -> Program:
        """The formula traced to a program for kernels, for a group's options."""
        names, known = list(by_step), []
        for name, option in options.items():
            if option is None or isinstance(option, bool):
                known.append((name, option))
            else:
                names.append(name)
        program = _program(self.element, tuple(names), self.moments(group), self.shape, tuple(known))
        if self.elementwise and program.normed.results:
            raise TypeError(
                "a formula takes a norm of the whole tensor, of which a rank may have a part. Expected its rule with "
                "elementwise=False"
            )
        return program

    def numbers(self, number: int, group: Group, grad_scale: float) -> tuple[Any, ...]:
        """`UpdateRule.numbers`: the scalars that `kernels.cpu.optimizer.Update` takes."""
        options, by_step = self.options(group), self.by_step(number, group)
        program = self.program(group, options, by_step)
        given = {**options, **by_step, "step": number}
        scale = np.float32(-grad_scale if group.get("maximize") else grad_scale)
        numbers = tuple(map(float, map(given.__getitem__, program.names)))
        return optimizer.Numbers(program, scale, numbers, None if program.shared else program.numbers(numbers)[0])

    def on_gpu(self, group: Group) -> Options:
        """`UpdateRule.options`: the options of GPU kernels."""
        options = self.options(group)
        program = self.program(group, options, self.by_step(1, group))
        numbers = tuple([options[name] for name in program.names if name in options])
        return Options(program, -1.0 if group.get("maximize") else 1.0, numbers, self.by_step, _settings(group))

    def fused(self, step: Step) -> Fused | None:
        """`UpdateRule.fused`: the CPU kernel's update for the step's tensors, if it takes them."""
        master = step.master
        if master.positions is not None:
            return None
        names = _named(self.shape, tuple(step.kinds) or self.moments(step.group))
        moments = with_codes(step.moments, step.kinds, step.weight) if step.coded else dict(step.moments)
        return optimizer.prepare(names, step.weight, master.name, step.kept, step.grad, moments, master.rounding)


def _settings(group: Group) -> tuple[tuple[str, Any], ...]:
    """The scalar options of a group other than the learning rate, which may change at every step."""
    found: list[tuple[str, Any]] = []
    for name, option in group.items():
        several = option if isinstance(option, tuple | list) else (option,)
        if name not in ("lr", "params") and all(isinstance(one, int | float | Tensor) for one in several):
            numbers = tuple(map(float, several))
            found.append((name, numbers if several is option else numbers[0]))
    return tuple(found)


@lru_cache(maxsize=1024)
def _named(shape: Callable[[str, tuple[int, ...]], tuple[int, ...]], moments: tuple[str, ...]) -> optimizer.Names:
    """(names of moments that are one scalar a tensor, names of moments with one value an element)."""
    one = tuple([name for name in moments if shape(name, (2,)) == ()])
    return one, tuple([name for name in moments if name not in one])


@lru_cache(maxsize=1024)
def _program(
    element: Element,
    names: tuple[str, ...],
    moments: tuple[str, ...],
    shape: Callable[[str, tuple[int, ...]], tuple[int, ...]],
    known: tuple[tuple[str, Any], ...],
) -> Program:
    one, each = _named(shape, moments)

    def formula(weight: Any, grad: Any, kept: Any, options: Any) -> Any:
        return element(weight, grad, kept, SimpleNamespace(**options))

    return traced(formula, ["step", *names], one, each, dict(known))
