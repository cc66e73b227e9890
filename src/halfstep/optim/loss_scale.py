"""Loss scaling: torch.amp.GradScaler's interface and trajectory, plus what people miss in it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from halfstep.errors import LossScaleError
from halfstep.ops import grad_values
from halfstep.optim.overflow import find_nonfinite, named_grads


_MAX_STATIC_SKIPS = 32
EXTRA = "halfstep"  # the one key beside torch's five: patience left, and what the follower keeps

Outputs = TypeVar("Outputs", Tensor, list[Any], tuple[Any, ...], Iterable[Any])


@dataclass
class _Pending:
    """What is known of one optimizer's gradients since the last update()."""

    stage: str = "ready"  # -> "unscaled" -> "stepped"
    found_inf: bool | None = None
    overflowed: tuple[str, ...] = ()
    coefficient: float = 1.0


class Follower(Protocol):
    """What moves on with the scaler's updates, and is saved with its state."""

    def advance(self, skipped: bool = False) -> None:
        """End an optimizer step, which was skipped where gradients overflowed."""

    def state_dict(self) -> dict[str, Tensor]:
        """What to save; nothing for most recipes."""

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Put it back."""

    def reset(self) -> None:
        """Start anew."""


class LossScaler:
    """Multiplies the loss by S, divides the gradients by S, skips steps whose gradients overflowed, and adapts S.

    A drop-in for `torch.amp.GradScaler`: the same methods, the same five state keys, the same scales step by step.
    Beyond it: a constant scale (`dynamic=False`), a floor (`min_scale`), DeepSpeed's `hysteresis`, `clip_grad_norm_`,
    the number of skipped steps, the names of the parameters that overflowed, and fp16 gradients. With optimizers that
    follow torch's protocol for it (halfstep's, torch's fused ones) the division by S happens inside the update.

    Args:
        device: accepted for the drop-in's sake; the scale follows the loss.
        init_scale: S at the start.
        growth_factor: what S is multiplied by after `growth_interval` steps without overflow.
        backoff_factor: what S is multiplied by after an overflow.
        enabled: False makes every method the identity, but for `step` and `clip_grad_norm_`.
        dynamic: False keeps S constant; overflowing steps are skipped all the same.
        min_scale: an overflow at this scale is an error. torch has no floor: S sinks to 0 and 1/S becomes infinite.
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
        if growth_factor <= 1.0 or not 0.0 < backoff_factor < 1.0:
            raise LossScaleError(
                f"growth_factor {growth_factor} and backoff_factor {backoff_factor} given; "
                "expected growth_factor > 1 and 0 < backoff_factor < 1"
            )
        if init_scale <= 0 or min_scale <= 0 or hysteresis < 1 or growth_interval < 1:
            raise LossScaleError(
                f"init_scale {init_scale}, min_scale {min_scale}, hysteresis {hysteresis}, growth_interval "
                f"{growth_interval} given; expected positive scales, hysteresis and growth_interval at least 1"
            )
        self.skipped_steps = 0
        self.overflowed: tuple[str, ...] = ()
        """The parameters whose gradients were not finite in the last skipped step."""
        self._scale = _float32(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._enabled = enabled
        self._dynamic = dynamic
        self._min_scale = min_scale
        self._hysteresis = hysteresis
        self._patience = hysteresis
        self._consecutive_skips = 0
        self._names = names or {}
        self._follower = follower
        self._process_group = process_group
        self._pending: dict[int, _Pending] = {}

    # ---- the loop: scale, (unscale_ or clip_grad_norm_), step, update ---------------------------------------------

    def scale(self, outputs: Outputs) -> Outputs:
        """The loss (or a nested list or tuple of losses) times S, in float32 for a 0-d loss."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * torch.full((), self._scale, dtype=torch.float32, device=outputs.device)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise LossScaleError(f"scale() got {type(outputs).__name__}; expected a tensor or a sequence of tensors")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by S in place, once, for code that wants to look at them before `step`.

        Raises:
            LossScaleError: called twice, or after step(), since the last update(); or a gradient is fp16, whose
                small values would flush to zero when divided in place: use `clip_grad_norm_`, or leave it to step().
        """
        if not self._enabled:
            return
        pending = self._of(optimizer)
        if pending.stage != "ready":
            raise LossScaleError(
                f"unscale_() on an optimizer that is already {pending.stage} since the last update(); call it once, "
                "before step()"
            )
        half = [n for n, grad in self._grads(optimizer) if grad.dtype not in (torch.float32, torch.bfloat16)]
        if half:
            raise LossScaleError(
                f"unscale_() would flush small fp16 gradients to zero ({half[0]} and {len(half) - 1} more). "
                "For clipping use scaler.clip_grad_norm_(optimizer, max_norm); otherwise let step() divide in float32, "
                "which needs an optimizer from halfstep.prepare or a fused one from torch"
            )
        self._check(optimizer, pending)
        inverse = 1.0 / self._scale
        with torch.no_grad():
            for _, grad in self._grads(optimizer):
                grad.mul_(inverse)
        pending.stage = "unscaled"

    @torch.no_grad()
    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all of the optimizer's unscaled gradients together; returns the norm before clipping.

        The norm is taken in float32 and the coefficient min(1, max_norm / (norm + 1e-6)) is applied inside the update
        where the optimizer can, so fp16 gradients lose nothing. A replacement for `unscale_` followed by
        `torch.nn.utils.clip_grad_norm_`, which works with every recipe.
        """
        pending = self._of(optimizer)
        if pending.stage == "stepped" and self._enabled:
            raise LossScaleError("clip_grad_norm_() after step(); call it between backward() and step()")
        grads = [grad for _, grad in self._grads(optimizer)]
        if not grads:
            return torch.zeros(())
        if not _scales_itself(optimizer) and self._enabled and pending.stage == "ready":
            self.unscale_(optimizer)
        norms = [torch.linalg.vector_norm(grad_values(grad), norm_type, dtype=torch.float32) for grad in grads]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
        if self._enabled and pending.stage == "ready":
            norm = norm / self._scale
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if _scales_itself(optimizer):
            pending.coefficient = float(coefficient)
        else:
            for grad in grads:
                grad.mul_(coefficient.to(grad.device))
        return norm

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()` on the unscaled gradients, unless one of them is infinite or NaN: then nothing."""
        pending = self._of(optimizer)
        if self._enabled:
            if pending.stage == "stepped":
                raise LossScaleError("step() has already been called since the last update(); call update() first")
            if "closure" in kwargs or args:
                raise LossScaleError("a closure cannot be used with loss scaling: it would be scaled only once")
            self._check(optimizer, pending)
            if pending.found_inf:
                pending.stage = "stepped"
                return None
            if pending.stage == "ready" and not _scales_itself(optimizer):
                self.unscale_(optimizer)
        divisor = self._scale if self._enabled and pending.stage == "ready" else 1.0
        divisor = divisor / pending.coefficient if pending.coefficient else math.inf  # clipped to nothing
        pending.stage, pending.coefficient = "stepped", 1.0
        if divisor == 1.0:
            return optimizer.step(*args, **kwargs)
        device = next((grad.device for _, grad in self._grads(optimizer)), None)
        optimizer.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt S to what the steps since the last update found; call it once, after them.

        Raises:
            LossScaleError: no step was taken or unscaled; or the gradients overflow at the scale's floor, or in
                too many steps in a row of a constant scale.
        """
        pending, self._pending = self._pending, {}
        skipped = any(p.found_inf for p in pending.values())
        if self._enabled:
            checked = [p for p in pending.values() if p.found_inf is not None]
            if new_scale is not None:
                self._scale = _float32(float(new_scale))
            elif not checked:
                raise LossScaleError("update() before any step() or unscale_(); call it after scaler.step(optimizer)")
            elif any(p.found_inf for p in checked):
                self.skipped_steps += 1
                self._consecutive_skips += 1
                self.overflowed = tuple(name for p in checked for name in p.overflowed)
                self._back_off()
            else:
                self._consecutive_skips = 0
                self._grow()
        if self._follower is not None:
            self._follower.advance(skipped)

    def _back_off(self) -> None:
        self._growth_tracker = 0
        if not self._dynamic:
            if self._consecutive_skips >= _MAX_STATIC_SKIPS:
                advice = "Try a smaller scale, or a dynamic one. If that does not help, "
                raise LossScaleError(self._stuck(f"at the constant loss scale {self._scale:g}", advice))
        elif self._patience > 1:
            self._patience -= 1
        else:
            lower = _float32(self._scale * self._backoff_factor)
            if lower < self._min_scale:
                raise LossScaleError(
                    self._stuck(f"at the loss scale's floor, {self._scale:g}", "No smaller one helps: ")
                )
            self._scale = lower

    def _grow(self) -> None:
        self._growth_tracker += 1
        if self._dynamic and self._growth_tracker == self._growth_interval:
            higher = _float32(self._scale * self._growth_factor)
            self._scale = higher if higher != float("inf") else self._scale
            self._growth_tracker = 0
            self._patience = self._hysteresis

    def _stuck(self, where: str, advice: str) -> str:
        named = f" in {', '.join(self.overflowed[:3])}" if self.overflowed else ""
        return (
            f"the gradients are infinite or NaN{named} {where}, {self._consecutive_skips} steps in a row. {advice}"
            "the forward pass itself overflows or makes NaN. Look for the first non-finite activation "
            "(`halfstep train` names it), keep that module in float32, train in bf16 (recipe 'bf16-mixed'), "
            "or lower the learning rate"
        )

    def _check(self, optimizer: torch.optim.Optimizer, pending: _Pending) -> None:
        """Find out, once per update, whether every gradient is finite."""
        if pending.found_inf is None:
            pending.found_inf, pending.overflowed = find_nonfinite(self._grads(optimizer), self._process_group)

    def _grads(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
        return named_grads(optimizer, self._names)

    def _of(self, optimizer: torch.optim.Optimizer) -> _Pending:
        return self._pending.setdefault(id(optimizer), _Pending())

    # ---- torch.amp.GradScaler's accessors -------------------------------------------------------------------------

    def get_scale(self) -> float:
        """S, or 1 when disabled."""
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """The growth factor."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """The back-off factor."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the back-off factor."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """The growth interval."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval."""
        self._growth_interval = new_interval

    def is_enabled(self) -> bool:
        """Whether the loss is scaled at all."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys; none when disabled. Hysteresis in progress, and scaling states, add a key each."""
        followed = self._follower.state_dict() if self._follower is not None else {}
        extra: dict[str, Any] = {"scaling": followed} if followed else {}
        if self._enabled and self._hysteresis > 1:
            extra["patience"] = self._patience
        if not self._enabled:
            return {EXTRA: extra} if extra else {}
        state: dict[str, Any] = {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }
        return state | ({EXTRA: extra} if extra else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        Raises:
            LossScaleError: the state is empty (it was saved by a disabled scaler) or lacks a key; scaling states of
                another model or recipe.
        """
        if self._enabled:
            self._check_keys(state_dict)
        if self._follower is not None:
            self._follow(self._follower, state_dict.get(EXTRA, {}).get("scaling", {}))
        if not self._enabled:
            return
        self._scale = float(state_dict["scale"])
        self._growth_factor = float(state_dict["growth_factor"])
        self._backoff_factor = float(state_dict["backoff_factor"])
        self._growth_interval = int(state_dict["growth_interval"])
        self._growth_tracker = int(state_dict["_growth_tracker"])
        self._patience = int(state_dict.get(EXTRA, {}).get("patience", self._hysteresis))

    def _follow(self, follower: Follower, saved: Mapping[str, Tensor]) -> None:
        if follower.state_dict() and not saved:
            warnings.warn(
                "the scaler state holds no scaling states, so the model's scales start anew; save "
                "scaler.state_dict() beside the model to resume exactly",
                stacklevel=3,
            )
            follower.reset()
            return
        follower.load_state_dict(saved)

    def _check_keys(self, state_dict: Mapping[str, Any]) -> None:
        expected = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        missing = [key for key in expected if key not in state_dict]
        if missing:
            raise LossScaleError(
                f"the scaler state lacks {', '.join(missing)}; expected torch.amp.GradScaler's five keys. "
                "A disabled scaler saves an empty state: resume with the recipe the state was saved under"
            )


def _scales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides by `grad_scale` inside its update (torch's protocol for fused optimizers)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _float32(value: float) -> float:
    """Rounded to float32, in which torch keeps the scale; infinite beyond its range."""
    return float(torch.tensor(value, dtype=torch.float64).float())
