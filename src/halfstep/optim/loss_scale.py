"""Loss scaling: torch.amp.GradScaler's interface and trajectory, plus what people miss in it."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from halfstep.errors import LossScaleError
from halfstep.optim.dynamic_scale import EXTRA, DynamicScale, check_keys, float32
from halfstep.optim.gradients import (
    grads_of,
    late,
    multiply,
    named_grads,
    names_of,
    narrow_all,
    parameters_of,
    takes_float32,
    total_norm,
)
from halfstep.optim.overflow import find_late, find_nonfinite
from halfstep.optim.pending import AllPending, Pending, unwrapped


__all__ = ["EXTRA", "Follower", "LossScaler"]

Outputs = TypeVar("Outputs", Tensor, list[Any], tuple[Any, ...], Iterable[Any])


class Follower(Protocol):
    """What moves on with the scaler's updates, and is saved with its state."""

    def advance(self, skipped: bool | Tensor = False) -> None:
        """End an optimizer step, which was skipped where gradients overflowed; a tensor says so on a GPU."""

    def state_dict(self) -> dict[str, Any]:
        """What to save, by names that are none of the scaler's; nothing for most recipes."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Put it back; what is missing begins anew, and says so."""


class LossScaler(DynamicScale):
    """Multiplies the loss by S, divides the gradients by S, skips steps whose gradients overflowed, and adapts S.

    A drop-in for `torch.amp.GradScaler`: the same methods, the same five state keys, the same scales step by step.
    Beyond it: a constant scale (`dynamic=False`), a floor (`min_scale`), DeepSpeed's `hysteresis`, `clip_grad_norm_`,
    the number of skipped steps, the names of the parameters that overflowed, and fp16 gradients. With optimizers that
    follow torch's protocol for it (halfstep's, torch's fused ones) the division by S happens inside the update.

    A copy or a pickle of a scaler holds a copy of the model whose scaling states it moves: copy both together. To save
    one for later use `state_dict`.

    Args:
        device: accepted for the drop-in's sake; the scale follows the loss.
        init_scale: S at the start.
        growth_factor: what S is multiplied by after `growth_interval` steps without overflow.
        backoff_factor: what S is multiplied by after an overflow.
        enabled: False makes every method the identity, except `step` and `clip_grad_norm_`.
        dynamic: False keeps S constant; overflowing steps are skipped all the same.
        min_scale: an overflow at this scale is an error. torch has no floor: S falls to 0 and 1/S becomes infinite.
        hysteresis: how many overflows it takes to lower S (DeepSpeed's meaning: refilled when S grows).
        names: the parameters' names, for `overflowed`.
        follower: what moves on with every `update()` and is saved with this state (a model's scaling states).
        process_group: over which the overflow flags are combined; None is the default group where there is one.

    Source: torch.amp.grad_scaler; DeepSpeed's DynamicLossScaler for the hysteresis; Micikevicius et al. 2018.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dynamic: bool = True,
        min_scale: float = 2.0**-16,
        hysteresis: int = 1,
        names: Mapping[nn.Parameter, str] | None = None,
        follower: Follower | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            init_scale, growth_factor, backoff_factor, growth_interval, enabled, dynamic, min_scale, hysteresis
        )
        self._names = names or {}
        self._follower = follower
        self._process_group = process_group
        self._forget()

    def _forget(self) -> None:
        self._pending = AllPending()
        self._widened: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    # ---- the loop: scale, (unscale_ or clip_grad_norm_), step, update ---------------------------------------------

    def scale(self, outputs: Outputs) -> Outputs:
        """The loss (or a nested list or tuple of losses) times S, in float32 for a 0-d loss."""
        self._pending.look_back()
        for optimizer in self._widened:
            narrow_all(optimizer)
        return self._scaled(outputs) if self._enabled else outputs

    def _scaled(self, outputs: Outputs) -> Outputs:
        if isinstance(outputs, Tensor):
            return outputs * self._factor(outputs.device)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self._scaled(output) for output in outputs)
        if isinstance(outputs, Iterable):
            return map(self._scaled, outputs)
        raise LossScaleError(f"scale() got {type(outputs).__name__}; expected a tensor or a sequence of tensors")

    def _factor(self, device: torch.device) -> Tensor:
        """S there, a float32 scalar."""
        if self._late is None and not late(device):
            return torch.full((), self._scale, dtype=torch.float32, device=device)
        return self._on(device).scale.to(device)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by S in place, once, for code that wants to look at them before `step`.

        16-bit gradients leave for float32, where halfstep's optimizer takes it, and stay there until they are dropped
        (`zero_grad`): 4 bytes a parameter until then, and no small one is lost.

        Raises:
            LossScaleError: called twice, or after step(), since the last update(); the last gradients overflowed and
                were dropped without an update(); or a gradient is fp16 and cannot leave (an optimizer of torch, or
                torch before 2.10): its small values would become zero.
        """
        if not self._enabled:
            return
        optimizer, pending = self._of(optimizer)
        if pending.stage != "ready":
            raise LossScaleError(
                f"unscale_() on an optimizer that is already {pending.stage} since the last update(); call it once, "
                "before step()"
            )
        self._check(optimizer, pending)
        if isinstance(pending.found_inf, Tensor):
            self._multiply(optimizer, self._factor(pending.found_inf.device).double().reciprocal().float())
        else:
            self._multiply(optimizer, 1.0 / self.get_scale())
        pending.stage = "unscaled"

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's gradients have been divided by S since the last update(), and are still there."""
        return self._of(optimizer)[1].stage == "unscaled"

    @torch.no_grad()
    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all of the optimizer's unscaled gradients together; returns the norm before clipping.

        `unscale_` followed by `torch.nn.utils.clip_grad_norm_`, for every recipe: the norm is taken in float32, and the
        gradients are divided by S and multiplied by min(1, max_norm / (norm + 1e-6)) where they are, in one float32
        multiplication (16-bit ones leave for float32, as in `unscale_`). With nothing to multiply by, they are left
        alone. accelerate's own `clip_grad_norm_`, and Trainer's, do not unscale for a scaler that is set on them, and
        nobody can tell afterwards: clip with this one.

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
        if not self._grads(optimizer):
            return torch.zeros(())
        if self._scaled_yet(pending):
            self._check(optimizer, pending)
            if not takes_float32(optimizer):
                self.unscale_(optimizer)  # as torch does: two multiplications
        if late(self._device(optimizer)):
            norm = self._clip_unread(optimizer, pending, max_norm, norm_type)
        else:
            norm = self._clip(optimizer, pending, max_norm, norm_type)
        if self._enabled:
            pending.stage = "unscaled"
        return norm

    def _clip(
        self, optimizer: torch.optim.Optimizer, pending: Pending, max_norm: float, norm_type: float
    ) -> Tensor:
        norm = self._norm(optimizer, norm_type)
        if self._scaled_yet(pending) and not pending.found_inf and not norm.isfinite():
            self.unscale_(optimizer)  # finite gradients, whose squares overflow while they are multiplied by S
            norm = self._norm(optimizer, norm_type)
        divisor = self.get_scale() if self._scaled_yet(pending) else 1.0
        norm = norm / divisor
        coefficient = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        factor = coefficient
        if takes_float32(optimizer):
            # The number that the update would divide by, had it both to do, in float32.
            factor = 1.0 / float32(divisor / coefficient) if coefficient else 0.0
        if factor != 1.0:
            self._multiply(optimizer, factor)
        return norm

    def _clip_unread(
        self, optimizer: torch.optim.Optimizer, pending: Pending, max_norm: float, norm_type: float
    ) -> Tensor:
        """The same where the host waits for no number: gradients are multiplied whatever the factor is."""
        scaled = self._scaled_yet(pending)
        # Squares of gradients that are still multiplied by S stay finite in float64.
        norm = self._norm(optimizer, norm_type, torch.float64 if scaled else torch.float32)
        divisor = self._factor(norm.device).double() if scaled else torch.ones_like(norm, dtype=torch.float64)
        norm = (norm / divisor).float()
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).double()
        factor = coefficient
        if takes_float32(optimizer):
            factor = torch.where(coefficient == 0, 0.0, 1.0 / (divisor / coefficient).float().double())
        self._multiply(optimizer, factor.float())
        return norm

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()` on the unscaled gradients, unless one of them is infinite or NaN: then nothing.

        Raises:
            LossScaleError: called twice since the last update(); with a closure, while the loss is scaled; otherwise
                as `unscale_`.
        """
        given = optimizer
        optimizer, pending = self._of(optimizer)
        if not self._enabled:
            pending.stage = "stepped"
            return given.step(*args, **kwargs)
        if pending.stage == "stepped":
            raise LossScaleError("step() has already been called since the last update(); call update() first")
        if kwargs.get("closure") is not None or (args and args[0] is not None):
            raise LossScaleError(
                "a closure cannot be used with loss scaling: the gradients it makes would be neither checked nor "
                "divided by the scale. Call it yourself before step(), or train without a loss scale ('bf16-mixed')"
            )
        self._check(optimizer, pending)
        if isinstance(pending.found_inf, Tensor) and _divides(optimizer):
            return self._step_unread(given, optimizer, pending, *args, **kwargs)
        if not pending.found_inf and pending.stage == "ready" and not _divides(optimizer):
            self.unscale_(optimizer)
        divisor = self.get_scale() if pending.stage == "ready" else 1.0
        pending.stage = "stepped"
        if pending.found_inf:
            return None
        if divisor == 1.0:
            return given.step(*args, **kwargs)
        device = next((grad.device for _, grad in self._grads(optimizer)), None)
        optimizer.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        try:
            return given.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def _step_unread(
        self, given: torch.optim.Optimizer, optimizer: Any, pending: Pending, *args: Any, **kwargs: Any
    ) -> Any:
        """A step that the optimizer leaves out by itself, on the gradients' device."""
        assert isinstance(pending.found_inf, Tensor)
        optimizer.grad_scale = self._factor(pending.found_inf.device) if pending.stage == "ready" else None
        optimizer.found_inf = pending.found_inf
        pending.stage = "stepped"
        try:
            return given.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
            pending.stepped_unread(optimizer)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt S to what the steps since the last update found; call it once, after them.

        Where no optimizer has stepped (every one was skipped, or its gradients were dropped), the model's scaling
        states forget the batch instead of moving on.

        Raises:
            LossScaleError: no step was taken or unscaled; or the gradients overflow at the scale's floor, or in
                too many steps in a row of a constant scale.
        """
        pending = self._pending.take()
        moved = [p.moved(optimizer) for optimizer, p in pending]
        if self._enabled:
            checked = [p for _, p in pending if p.found_inf is not None]
            if new_scale is not None:
                self._settle()
                self._scale = float32(float(new_scale))
                self._put()
            elif not checked:
                raise LossScaleError("update() before any step() or unscale_(); call it after scaler.step(optimizer)")
            else:
                self._move_on(checked)
        if self._follower is not None:
            self._follower.advance(_none(moved))

    def _move_on(self, checked: list[Pending]) -> None:
        """Adapt S to what was found, where it was found."""
        names = tuple(name for p in checked for name in p.overflowed)
        there = next((p.found_inf.device for p in checked if isinstance(p.found_inf, Tensor)), None)
        if there is None and self._late is None:
            self._adapt(names if any(p.found_inf for p in checked) else None)
            return
        scale = self._on(there or torch.device("cpu"))
        device = scale.scale.device
        found = [torch.as_tensor(p.found_inf, dtype=torch.float32, device=device) for p in checked]
        lost = [
            torch.ones(len(p.overflowed), dtype=torch.bool, device=device) if p.lost is None else p.lost.to(device)
            for p in checked
        ]
        self._adapt_there(scale, torch.stack(found).amax(), names, torch.cat(lost))

    # ---- one optimizer's gradients --------------------------------------------------------------------------------

    def _check(self, optimizer: torch.optim.Optimizer, pending: Pending) -> None:
        """Find out, once per update, whether every gradient is finite."""
        if pending.found_inf is None:
            device = self._device(optimizer)
            if late(device):
                pending.overflowed = names_of(optimizer, self._names)
                pending.found_inf, pending.lost = find_late(grads_of(optimizer), device, self._process_group)
            else:
                found = find_nonfinite(self._grads(optimizer), device, self._process_group)
                pending.found_inf, pending.overflowed = found

    def _device(self, optimizer: torch.optim.Optimizer) -> torch.device:
        """Where its parameters are, the first of them at least."""
        first = next(parameters_of(optimizer), None)
        return torch.device("cpu") if first is None else first.device

    def _grads(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
        return named_grads(optimizer, self._names)

    def _norm(
        self, optimizer: torch.optim.Optimizer, norm_type: float, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return total_norm([grad for _, grad in self._grads(optimizer)], norm_type, dtype)

    def _multiply(self, optimizer: torch.optim.Optimizer, factor: float | Tensor) -> None:
        multiply(optimizer, factor, self._names)
        if takes_float32(optimizer):
            self._widened.add(optimizer)

    def _scaled_yet(self, pending: Pending) -> bool:
        """Whether the gradients are still multiplied by S."""
        return self._enabled and pending.stage == "ready"

    def _of(self, optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, Pending]:
        """The optimizer inside of what wraps it, and what is known of its gradients."""
        optimizer = unwrapped(optimizer)
        if self._enabled and getattr(optimizer, "awaits_scaler", False):
            optimizer.awaits_scaler = False  # type: ignore[attr-defined]
        return optimizer, self._pending.of(optimizer)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys; none when disabled. Hysteresis in progress, scaling states, and how far a recipe's stages
        are, add one key in all."""
        extra: dict[str, Any] = self._follower.state_dict() if self._follower is not None else {}
        if self._enabled and self._hysteresis > 1:
            extra["patience"] = self._patience
        if (self._enabled or extra) and any(p.stage == "stepped" for p in self._pending):
            warnings.warn(
                "the scaler's state was taken between step() and update(): a run that resumes from it never sees that "
                "update. Save after scaler.update()",
                stacklevel=2,
            )
        return (self._scale_state() if self._enabled else {}) | ({EXTRA: extra} if extra else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        Raises:
            LossScaleError: the state is empty (it was saved by a disabled scaler) or lacks a key; scaling states of
                another model or recipe.
        """
        if self._enabled:
            check_keys(state_dict)
        extra = state_dict.get(EXTRA, {})
        if self._follower is not None:
            self._follower.load_state_dict(extra)
        if self._enabled:
            self._load_scale(state_dict, extra.get("patience"))

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._pending:
            raise LossScaleError(
                "a scaler cannot be copied or pickled between unscale_(), clip_grad_norm_() or step() and update(), "
                "since the gradients would stay behind; do it after scaler.update()"
            )
        self._settle()
        return {name: value for name, value in vars(self).items() if name not in ("_pending", "_widened", "_late")}

    def __deepcopy__(self, memo: dict[int, Any]) -> LossScaler:
        memo[id(self._process_group)] = self._process_group  # ranks do not multiply
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._late = None
        self._forget()


def _divides(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides by `grad_scale` inside its update (torch's protocol for fused optimizers)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _none(moved: list[bool | Tensor]) -> bool | Tensor:
    """Whether there were optimizers, and not one of them has moved."""
    if not moved or any(one is True for one in moved):
        return False
    unread = [one for one in moved if isinstance(one, Tensor)]
    return ~torch.stack([one.to(unread[0].device) for one in unread]).any() if unread else True
