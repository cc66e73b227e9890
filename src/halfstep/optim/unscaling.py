"""`Unscaling`: check, unscale and clip an optimizer's gradients, once between two updates of the loss scale."""

import weakref
from collections.abc import Mapping
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import LossScaleError
from halfstep.optim.dynamic_scale import DynamicScale
from halfstep.optim.gradients import (
    NO_GRADIENT,
    find_nonfinite,
    gradients_dropped,
    gradients_multiplied,
    grads_of,
    multiply,
    names_of,
    no_gradient,
    parameters_of,
    takes_float32,
    total_norm,
)
from halfstep.quant.tracing import untraced


_version, _params = attrgetter("_version"), itemgetter("params")


class Pending:
    """The state of one optimizer's gradients since the last update()."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.stage = "ready"  # -> "unscaled" -> "stepped"; "dropped" once unscaled gradients were dropped
        self.found_inf: Tensor | None = None  # a float32 scalar, above 0 if a gradient is not finite
        self.waits = False  # whether the host would have to wait to read found_inf
        self.names: tuple[str, ...] = ()  # of all parameters
        self.lost: Tensor | None = None  # a boolean for each, True if its gradient is not finite
        self.versions = versions(optimizer)  # of parameters: initially, or after a step that may have been skipped

    def moved(self, optimizer: torch.optim.Optimizer) -> bool | Tensor:
        """Whether the optimizer has stepped, through the scaler or directly; a scalar tensor if the host would wait."""
        changed = self.versions != versions(optimizer)
        if changed or self.stage != "stepped":
            return changed
        if self.found_inf is None:
            return True
        return self.found_inf == 0 if self.waits else not self.found_inf


class AllPending(weakref.WeakKeyDictionary[torch.optim.Optimizer, Pending]):
    """The `Pending` of every optimizer that a scaler has seen since its last update(). It keeps no optimizer alive."""

    def take(self) -> list[tuple[torch.optim.Optimizer, Pending]]:
        """Remove and return all entries."""
        taken = list(self.items())
        self.clear()
        return taken

    @property
    def any_stepped(self) -> bool:
        """Whether a step was taken since the last update()."""
        return any(pending.stage == "stepped" for pending in self.values())

    def mark_dropped(self) -> None:
        """Called before another backward: marks optimizers whose unscaled gradients were dropped."""
        for optimizer, pending in self.items():
            if pending.stage == "unscaled" and gradients_dropped(optimizer):
                pending.stage = "dropped"

    def of(self, optimizer: torch.optim.Optimizer) -> Pending:
        """The optimizer's entry, or that of an optimizer with the same groups (`convert`); created if missing.

        Raises:
            LossScaleError: its last gradients overflowed and were dropped before an update().
        """
        same = [o for o in self if o.param_groups is optimizer.param_groups] if self else []
        pending = self[same[0]] if same else None
        if pending is not None and pending.stage == "dropped" and gradients_multiplied(optimizer):
            pending.stage = "unscaled"  # the gradients were restored
        if pending is not None and pending.stage == "dropped":
            if pending.found_inf:
                raise LossScaleError(
                    "the gradients of the last batch overflowed and were dropped before scaler.update(), so the loss "
                    "scale could not fall; call scaler.update() after every batch, even one whose step is left out"
                )
            pending = None
        if pending is None:
            pending = self[same[0] if same else optimizer] = Pending(optimizer)
        return pending


class Unscaling(DynamicScale):
    """A `DynamicScale` that checks, unscales and clips optimizers' gradients.

    Args:
        rule: the arguments of `DynamicScale`.
        names: the parameters' names.
        process_group: the ranks that combine their overflow flags.
    """

    def __init__(self, *rule: Any, names: Mapping[nn.Parameter, str] | None, process_group: Any) -> None:
        super().__init__(*rule)
        self._names = names or {}
        self._process_group = process_group
        self._forget()

    def _forget(self) -> None:
        self._pending = AllPending()
        self._widened: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._named: tuple[list[int], tuple[str, ...]] = [], ()
        """The ids of the parameters that were checked last, and their names."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by S, once, for code that reads them before `step`.

        16-bit gradients of halfstep's optimizers are replaced by float32 ones until they are dropped (`zero_grad`): 4
        bytes a parameter until then, and no small value is lost.

        Raises:
            LossScaleError: called twice, or after step(), since the last update(); the last gradients overflowed and
                were dropped without an update(); or a gradient is fp16 and cannot become float32 (an optimizer of
                torch): small values would become zero.
        """
        if self._enabled:
            self._unscale(optimizer)

    @untraced
    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer, pending = self._of(optimizer)
        if pending.stage != "ready":
            raise LossScaleError(
                f"unscale_() on an optimizer that is already {pending.stage} since the last update(); call it once, "
                "before step()"
            )
        self._multiply(optimizer, self._factor(self._check(optimizer, pending).device).double().reciprocal())
        pending.stage = "unscaled"

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's gradients have been divided by S since the last update(), and were not dropped."""
        return self._of(optimizer)[1].stage == "unscaled"

    @untraced
    @torch.no_grad()
    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all of the optimizer's unscaled gradients together; returns the norm before clipping.

        `unscale_` followed by `torch.nn.utils.clip_grad_norm_`, for every recipe: the norm is computed in float32, and
        the gradients are divided by S and multiplied by min(1, max_norm / (norm + 1e-6)) in one float32 multiplication
        (16-bit ones become float32, as in `unscale_`). They are not changed if the factor is 1. accelerate's own
        `clip_grad_norm_`, and Trainer's, do not unscale for a scaler that is set on them, which cannot be detected
        later: clip with this method.

        Raises:
            LossScaleError: called after step(); otherwise as `unscale_`.
        """
        optimizer, pending = self._of(optimizer)
        if getattr(optimizer, "per_layer", None) is not None:
            raise LossScaleError(
                "clip_grad_norm_() of an optimizer that steps in the backward pass (PerLayer), which leaves no "
                "gradients to take the norm of. Clip layer by layer: PerLayer(optimizer, max_norm=...)"
            )
        if pending.stage == "stepped" and self._enabled:
            raise LossScaleError("clip_grad_norm_() after step(); call it between backward() and step()")
        if not any(grad is not None for grad in grads_of(optimizer)):
            return torch.zeros((), dtype=torch.float32, device="cpu")
        if self._scaled_yet(pending):
            self._check(optimizer, pending)
            if not takes_float32(optimizer):
                self.unscale_(optimizer)  # as torch does: two multiplications
        norm = self._clip(optimizer, pending, max_norm, norm_type)
        if self._enabled:
            pending.stage = "unscaled"
        return norm

    def _clip(self, optimizer: torch.optim.Optimizer, pending: Pending, max_norm: float, norm_type: float) -> Tensor:
        scaled, waits = self._scaled_yet(pending), self._waits(_device(optimizer))
        grads = [grad for grad in grads_of(optimizer) if grad is not None]
        # In float64 the squares of scaled gradients stay finite.
        norm = total_norm(grads, norm_type, torch.float64 if scaled and waits else torch.float32)
        if scaled and not waits and not pending.found_inf and not norm.isfinite():
            norm = total_norm(grads, norm_type, torch.float64)
        divisor = self._factor(norm.device).double() if scaled else torch.ones_like(norm, dtype=torch.float64)
        norm = (norm / divisor).float()
        factor = coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).double()
        if takes_float32(optimizer):
            # As if the update divided by one float32 scalar that combines both factors.
            factor = torch.where(coefficient == 0, 0.0, 1.0 / (divisor / coefficient).float().double())
        if waits or float(factor.float()) != 1.0:
            self._multiply(optimizer, factor)
        return norm

    def _check(self, optimizer: torch.optim.Optimizer, pending: Pending) -> Tensor:
        """`Pending.found_inf`, computed once per update: whether any gradient is not finite.

        Raises:
            LossScaleError: no parameter has a gradient, on this rank or, if that is known, on another one.
        """
        if pending.found_inf is None:
            device = _device(optimizer)
            pending.waits, grads = self._waits(device), grads_of(optimizer)
            if (ids := list(map(id, parameters_of(optimizer)))) != self._named[0]:
                self._named = ids, names_of(optimizer, self._names)
            pending.names = self._named[1]
            here = any(grad is not None for grad in grads)
            found, pending.lost = find_nonfinite(grads, device, self._process_group)  # even without any: others wait
            if not here or (not pending.waits and float(found) == NO_GRADIENT):
                raise LossScaleError(no_gradient(elsewhere=here))
            pending.found_inf = found
        return pending.found_inf

    def _multiply(self, optimizer: torch.optim.Optimizer, factor: Tensor) -> None:
        multiply(optimizer, factor, self._names)
        if takes_float32(optimizer):
            self._widened.add(optimizer)

    def _scaled_yet(self, pending: Pending) -> bool:
        """Whether the gradients are still scaled by S."""
        return self._enabled and pending.stage == "ready"

    def _of(self, optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, Pending]:
        """The optimizer without wrappers, and its `Pending`."""
        optimizer = unwrapped(optimizer)
        if self._enabled and getattr(optimizer, "awaits_scaler", False):
            optimizer.awaits_scaler = False  # type: ignore[attr-defined]
        return optimizer, self._pending.of(optimizer)


def _device(optimizer: torch.optim.Optimizer) -> torch.device:
    """The device of the optimizer's first parameter."""
    first = next(parameters_of(optimizer), None)
    return torch.device("cpu") if first is None else first.device


def unwrapped(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer inside a wrapper of accelerate, Lightning or Fabric (their `.optimizer`), or itself."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def versions(optimizer: torch.optim.Optimizer) -> list[int]:
    """The version (torch's count of in-place writes) of each parameter."""
    return list(map(_version, chain.from_iterable(map(_params, optimizer.param_groups))))
