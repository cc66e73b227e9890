"""Watch the steps of any optimizer in this process: which updates left their value as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.auditing.setup import leaves
from halfstep.grouping import grouped
from halfstep.ops import CodeTensor
from halfstep.recipe import is_master


SAMPLE = 1 << 16
"""The most values of one tensor that are looked at, evenly spaced."""

_WRAPPED = ("module", "_orig_mod")
"""What wrappers call the one module that they wrap: DDP and FSDP, torch.compile."""


@dataclass(frozen=True)
class Moved:
    """What one step did to the values of one parameter that were looked at."""

    step: int
    rate: float
    highest: float
    """The rate, or a higher one that a schedule of torch's says it comes to."""
    wanted: Tensor
    """How many have a gradient other than zero, and were finite after it."""
    lost: Tensor
    """How many of these neither moved, nor anything that is kept beside them."""


class Watch:
    """Compares values before and after each step of every optimizer, and changes nothing. A context manager.

    Of each parameter what one step did is kept: the last one whose learning rate was at least half of the highest so
    far. Adam's first steps are larger than later ones, and those at the end of a schedule are too small to tell.

    Args:
        steps: before an optimizer takes one step more than these, `enough` is called.
    """

    def __init__(self, steps: int | None = None, enough: Callable[[], None] = lambda: None) -> None:
        self.moved: dict[Tensor, Moved] = {}
        self.trainer: type | None = None
        """The class of the Trainer of transformers whose optimizer steps, where one does."""
        self._limit, self._enough = steps, enough
        self._counted: dict[torch.optim.Optimizer, int] = {}
        self._models: dict[torch.optim.Optimizer, nn.Module | None] = {}
        self._before: dict[Tensor, list[Tensor]] = {}
        self._rates: dict[Tensor, float] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        disable: Any = torch.compiler.disable
        before, after = disable(self._note), disable(self._compare)
        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def steps(self) -> int:
        """The most steps that one optimizer has taken."""
        return max(self._counted.values(), default=0)

    @property
    def setups(self) -> list[tuple[nn.Module, list[torch.optim.Optimizer]]]:
        """Each model whose parameters optimizers have stepped on, with these optimizers."""
        self._look()
        return [*grouped((model, one) for one, model in self._models.items() if model is not None).items()]

    @property
    def homeless(self) -> list[torch.optim.Optimizer]:
        """Optimizers none of whose parameters belong to a module."""
        return [optimizer for optimizer, model in self._models.items() if model is None]

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        taken = self._counted.get(optimizer, 0)
        if self._limit is not None and taken >= self._limit:
            self._enough()
        if taken:
            self._look()
        self._before = {
            parameter: [_sample(one).clone() for one in _kept(optimizer, parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if self._tells(parameter, float(group.get("lr", 0.0))) and not isinstance(parameter, CodeTensor)
        }

    def _compare(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        step = self._counted[optimizer] = self._counted.get(optimizer, 0) + 1
        before, self._before = self._before, {}
        if bool(getattr(optimizer, "found_inf", None) or False):  # a loss scaler's: the step wrote nothing
            return
        for group in optimizer.param_groups:
            rate = float(group.get("lr", 0.0))
            highest = max(rate, *(float(group.get(name, 0.0)) for name in ("initial_lr", "max_lr")))
            for parameter in group["params"]:
                if parameter in before and (grad := _gradient(parameter)) is not None:
                    after = [_sample(one) for one in _kept(optimizer, parameter)]
                    self._rates[parameter] = max(rate, self._rates.get(parameter, 0.0))
                    self.moved[parameter] = Moved(step, rate, highest, *_counted(grad, before[parameter], after))
        if step == 1 and len(self._counted) == 1:
            self._look()

    def _tells(self, parameter: Tensor, rate: float) -> bool:
        """Whether a step at this rate is to be kept."""
        return rate > 0 and 2 * rate >= self._rates.get(parameter, 0.0)

    def _look(self) -> None:
        """Find the models of optimizers that are new, all of a round at once: it goes through every object."""
        new = [optimizer for optimizer in self._counted if optimizer not in self._models]
        if new:
            objects = gc.get_objects()
            self._models |= models_of(new, objects)
            trainers = [one for one in objects if _is_trainer(type(one)) and self._steps_for(one)]
            self.trainer = self.trainer or next(map(type, trainers), None)

    def _steps_for(self, trainer: Any) -> bool:
        """Whether one of the optimizers is that trainer's, below what accelerate puts around it."""
        optimizer = getattr(trainer, "optimizer", None)
        while optimizer is not None and not any(optimizer is one for one in self._counted):
            optimizer = getattr(optimizer, "optimizer", None)
        return optimizer is not None


def _kept(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    """The plain tensors that keep a parameter's value: its own, and what is beside them as a master."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    own = leaves(parameter, "")
    masters = (leaf for key, value in state.items() if is_master(key) for leaf in leaves(value, ""))
    return [tensor for _, tensor in (*own, *masters) if tensor.is_floating_point() or tensor.numel() > 1]


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE))]


def _gradient(parameter: Tensor) -> Tensor | None:
    """The values looked at of a gradient; None where there is none that is plain."""
    grad = parameter.grad
    if grad is None or grad.layout != torch.strided:
        return None
    plain = [tensor for _, tensor in leaves(grad, "")]
    return _sample(plain[0]) if len(plain) == 1 else None


def _counted(grad: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """How many updates were wanted, how many lost; a master that came up in the step, or has tiles, counts as moved."""
    wanted = (grad != 0) & after[0].isfinite()
    still = wanted
    if len(after) != len(before) or any(one.shape != grad.shape for one in (*before, *after)):
        still = torch.zeros_like(wanted)
    else:
        for one, other in zip(before, after, strict=True):
            still = still & (one == other)
    return wanted.sum(), still.sum()


def models_of(
    optimizers: Iterable[torch.optim.Optimizer], objects: Iterable[Any]
) -> dict[torch.optim.Optimizer, nn.Module | None]:
    """For each optimizer the outermost module among objects that has most of its parameters, wrappers taken off."""
    # type() and no isinstance: that asks every object for __class__, and lazy ones then load what they stand for.
    modules = [one for one in objects if issubclass(type(one), nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    roots = [(root, {id(p) for p in root.parameters()}) for root in modules if id(root) not in inner]
    found: dict[torch.optim.Optimizer, nn.Module | None] = {}
    for optimizer in optimizers:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        most = max(roots, key=lambda root: (len(root[1] & stepped), -len(root[1])), default=None)
        found[optimizer] = unwrapped(most[0]) if most is not None and most[1] & stepped else None
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """The module within DDP, FSDP and torch.compile."""
    while [*module._modules] in ([name] for name in _WRAPPED):
        (module,) = filter(None, module._modules.values())
    return module


def _is_trainer(kind: type) -> bool:
    return any(base.__name__ == "Trainer" and base.__module__ == "transformers.trainer" for base in kind.__mro__)
