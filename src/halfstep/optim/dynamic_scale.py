"""The scale's value and its way up and down: torch.amp.GradScaler's trajectory, accessors and state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from halfstep.errors import LossScaleError
from halfstep.optim.device_scale import MANY, STUCK, DeviceScale, Numbers, Rule
from halfstep.optim.overflow import no_gradient
from halfstep.recipe.projection import LARGEST


EXTRA = "halfstep"  # the one key beside torch's five: patience left, and what the follower keeps
_FIVE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_SMALLEST = torch.finfo(torch.float32).tiny
_MAX_STATIC_SKIPS = 32
_MANY_SKIPS = 20  # in a row; a scale that began 2^20 times too large is found by then


class DynamicScale:
    """S, which grows after `growth_interval` steps without overflow and shrinks after one.

    Source: torch.amp.grad_scaler; DeepSpeed's DynamicLossScaler for the hysteresis.
    """

    def __init__(
        self,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        dynamic: bool,
        min_scale: float,
        hysteresis: int,
    ) -> None:
        if not 1.0 < growth_factor < math.inf or not 0.0 < backoff_factor < 1.0:
            raise LossScaleError(
                f"growth_factor {growth_factor} and backoff_factor {backoff_factor} given; "
                "expected growth_factor > 1 and 0 < backoff_factor < 1"
            )
        scales = all(_SMALLEST <= scale <= LARGEST for scale in (init_scale, min_scale))
        if not scales or not hysteresis >= 1 or not growth_interval >= 1:
            raise LossScaleError(
                f"init_scale {init_scale}, min_scale {min_scale}, hysteresis {hysteresis}, growth_interval "
                f"{growth_interval} given; expected positive scales that float32 holds, hysteresis and growth_interval "
                "at least 1"
            )
        self._skipped_steps = 0
        self._overflowed: tuple[str, ...] = ()
        self._late: DeviceScale | None = None  # where the numbers are, once gradients lie on a GPU
        self._scale = float32(init_scale)
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

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; as `get_scale`, it waits for a GPU."""
        self._settle()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, steps: int) -> None:
        self._settle()
        self._skipped_steps = steps
        self._put()

    @property
    def overflowed(self) -> tuple[str, ...]:
        """The parameters whose gradients were not finite in the last skipped step."""
        self._settle()
        return self._overflowed

    # ---- on a GPU ---------------------------------------------------------------------------------------------------

    def _on(self, device: torch.device) -> DeviceScale:
        """The numbers on the device of the gradients, from the first time on that somebody asks."""
        if self._late is None:
            self._late = DeviceScale(self._numbers, device)
        return self._late

    @property
    def _numbers(self) -> Numbers:
        return Numbers(self._scale, self._growth_tracker, self._patience, self._consecutive_skips, self._skipped_steps)

    def _put(self) -> None:
        """Tell the device of numbers that were set here."""
        if self._late is not None:
            self._late.put(self._numbers)

    def _settle(self) -> None:
        """Read what has moved on the device."""
        if self._late is None:
            return
        before, numbers = self._skipped_steps, self._late.numbers()
        self._scale, self._growth_tracker, self._patience, self._consecutive_skips, self._skipped_steps = numbers
        if self._skipped_steps != before:
            self._overflowed = self._late.overflowed()

    def _adapt_there(self, late: DeviceScale, found: torch.Tensor, names: tuple[str, ...], lost: torch.Tensor) -> None:
        """`_adapt` on the device. What it comes to is raised when the host hears of it: an update or so later."""
        heard = late.posted()
        if heard:
            self._settle()
        if heard == MANY:
            self._warn_of_skips()
        elif heard:
            raise LossScaleError(self._stuck() if heard == STUCK else no_gradient(elsewhere=True))
        if not late.holds(names):
            self._settle()
        rule = Rule(
            self._growth_factor, self._backoff_factor, self._growth_interval, self._dynamic, self._min_scale,
            self._hysteresis, _MAX_STATIC_SKIPS, _MANY_SKIPS,
        )  # fmt: skip
        late.advance(rule, found, names, lost)

    # ---- on the host ------------------------------------------------------------------------------------------------

    def _adapt(self, overflowed: tuple[str, ...] | None) -> None:
        """Move on after a step; `overflowed` names the parameters for which it was skipped, None if it was not."""
        if overflowed is None:
            self._consecutive_skips = 0
            self._grow()
            return
        self._skipped_steps += 1
        self._consecutive_skips += 1
        self._overflowed = overflowed
        self._back_off()
        if self._consecutive_skips == _MANY_SKIPS:
            self._warn_of_skips()

    def _back_off(self) -> None:
        self._growth_tracker = 0
        if not self._dynamic:
            if self._consecutive_skips >= _MAX_STATIC_SKIPS:
                raise LossScaleError(self._stuck())
        elif self._patience > 1:
            self._patience -= 1
        else:
            lower = float32(self._scale * self._backoff_factor)
            if lower < self._min_scale:
                raise LossScaleError(self._stuck())
            self._scale = lower

    def _grow(self) -> None:
        self._growth_tracker += 1
        if self._dynamic and self._growth_tracker == self._growth_interval:
            higher = float32(self._scale * self._growth_factor)
            self._scale = higher if higher != float("inf") else self._scale
            self._growth_tracker = 0
            self._patience = self._hysteresis

    def _warn_of_skips(self) -> None:
        first = f"{self._overflowed[0]} first" if self._overflowed else "another rank's"
        kind = "now" if self._dynamic else "constant"
        warnings.warn(
            f"{self._consecutive_skips} steps in a row were skipped, and no weight moved: gradients are infinite or "
            f"NaN ({first}), and the loss scale is {self._scale:g} {kind}. Where it began far too large, lower it "
            "(loss_scale = {init = 65536} of a recipe); else the forward pass itself overflows or makes NaN "
            "(halfstep.tracking.first_nonfinite names the first such tensor), or the data have it",
            stacklevel=4,
        )

    def _stuck(self) -> str:
        """What to say where no other scale helps."""
        where, advice = f"at the loss scale's floor, {self._scale:g}", "No smaller one helps: "
        if not self._dynamic:
            where = f"at the constant loss scale {self._scale:g}"
            advice = "Try a smaller scale, or a dynamic one. If that does not help, "
        named = f" in {', '.join(self._overflowed[:3])}" if self._overflowed else ""
        return (
            f"the gradients are infinite or NaN{named} {where}, {self._consecutive_skips} steps in a row. {advice}"
            "the forward pass itself overflows or makes NaN. Look for the first non-finite activation "
            "(`halfstep train` names it), keep that module in float32, train in bf16 (recipe 'bf16-mixed'), "
            "or lower the learning rate"
        )

    def _scale_state(self) -> dict[str, Any]:
        """torch's five keys."""
        self._settle()
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def _load_scale(self, state: Mapping[str, Any], patience: int | None) -> None:
        self._settle()
        self._scale = float(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])
        self._patience = self._hysteresis if patience is None else int(patience)
        self._put()

    # ---- torch.amp.GradScaler's accessors -------------------------------------------------------------------------

    def get_scale(self) -> float:
        """S, or 1 when disabled. On a GPU it is read there, which waits for all that was launched."""
        self._settle()
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


def check_keys(state: Mapping[str, Any]) -> None:
    """Refuse a state that lacks one of torch's keys, or whose scale scales nothing.

    Raises:
        LossScaleError: it does.
    """
    missing = [key for key in _FIVE if key not in state]
    if missing:
        raise LossScaleError(
            f"the scaler state lacks {', '.join(missing)}; expected torch.amp.GradScaler's five keys. "
            "A disabled scaler saves an empty state: resume with the recipe the state was saved under"
        )
    if not 0 < float(state["scale"]) <= LARGEST:
        raise LossScaleError(
            f"the scaler state has a scale of {state['scale']}; expected a positive number that float32 holds. Leave "
            "this state out, and let the scale begin anew"
        )


def float32(value: float) -> float:
    """Rounded to float32, in which torch keeps the scale; infinite beyond its range."""
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").float())
