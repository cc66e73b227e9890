"""The loss scale taken out of an optimizer's gradients: looked at, divided, clipped, once between two updates."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import LossScaleError
from halfstep.ops.untraced import untraced
from halfstep.optim import unread
from halfstep.optim.dynamic_scale import DynamicScale, float32
from halfstep.optim.gradients import (
    grads_of,
    late,
    multiply,
    named_grads,
    names_of,
    parameters_of,
    takes_float32,
    total_norm,
)
from halfstep.optim.overflow import find_late, find_nonfinite
from halfstep.optim.pending import AllPending, Pending, unwrapped


class Unscaling(DynamicScale):
    """A `DynamicScale` and the gradients that are multiplied by it, until `update()`.

    Args:
        rule: what a `DynamicScale` takes.
        names: the parameters' names.
        process_group: over which the overflow flags are combined.
    """

    def __init__(self, *rule: Any, names: Mapping[nn.Parameter, str] | None, process_group: Any) -> None:
        super().__init__(*rule)
        self._names = names or {}
        self._process_group = process_group
        self._forget()

    def _forget(self) -> None:
        self._pending = AllPending()
        self._widened: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def _factor(self, device: torch.device) -> Tensor:
        """S there, a float32 scalar."""
        if self._late is None and not late(device):
            return torch.full((), self._scale, dtype=torch.float32, device=device)
        return self._on(device).scale.to(device)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by S in place, once, for code that wants to look at them before `step`.

        16-bit gradients leave for float32, where halfstep's optimizer takes it, and stay there until they are dropped
        (`zero_grad`): 4 bytes a parameter until then, and no small one is lost. Before torch 2.10 they cannot: bf16
        ones are rounded where they stand.

        Raises:
            LossScaleError: called twice, or after step(), since the last update(); the last gradients overflowed and
                were dropped without an update(); or a gradient is fp16 and cannot leave (an optimizer of torch, or
                torch before 2.10): its small values would become zero.
        """
        if not self._enabled:
            return
        if torch.compiler.is_compiling():
            untraced(Unscaling.unscale_, self, optimizer)
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
        if torch.compiler.is_compiling():
            return untraced(Unscaling.clip_grad_norm_, self, optimizer, max_norm, norm_type)  # type: ignore[no-any-return]
        optimizer, pending = self._of(optimizer)
        if getattr(optimizer, "per_layer", None) is not None:
            raise LossScaleError(
                "clip_grad_norm_() of an optimizer that steps in the backward pass (PerLayer), which leaves no "
                "gradients to take the norm of. Clip layer by layer: PerLayer(optimizer, max_norm=...)"
            )
        if pending.stage == "stepped" and self._enabled:
            raise LossScaleError("clip_grad_norm_() after step(); call it between backward() and step()")
        if not self._grads(optimizer):
            return torch.zeros((), dtype=torch.float32, device="cpu")
        if self._scaled_yet(pending):
            self._check(optimizer, pending)
            if not takes_float32(optimizer):
                self.unscale_(optimizer)  # as torch does: two multiplications
        clip = self._clip_unread if late(self._device(optimizer)) else self._clip
        norm = clip(optimizer, pending, max_norm, norm_type)
        if self._enabled:
            pending.stage = "unscaled"
        return norm

    def _clip(self, optimizer: torch.optim.Optimizer, pending: Pending, max_norm: float, norm_type: float) -> Tensor:
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
        divisor = self._factor(norm.device) if scaled else torch.ones_like(norm)
        norm, factor = unread.clipping(norm, divisor, max_norm, takes_float32(optimizer))
        self._multiply(optimizer, factor)
        return norm

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

    def _norm(self, optimizer: torch.optim.Optimizer, norm_type: float, dtype: torch.dtype = torch.float32) -> Tensor:
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
