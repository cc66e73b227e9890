"""`DynamicScale`: the loss scale as tensors, with torch.amp.GradScaler's updates, accessors and state."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from halfstep.errors import LossScaleError
from halfstep.optim.gradients import NO_GRADIENT, no_gradient
from halfstep.recipe.projection import LARGEST, SMALLEST


EXTRA = "halfstep"  # the one key beside torch's five: for the hysteresis and the follower's state
_FIVE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_MAX_STATIC_SKIPS = 32
_MANY_SKIPS = 20  # in a row: a scale that started 2^20 times too large would be right by then
_MANY, _STUCK, _GRADIENTLESS = 1, 2, 3  # messages to the host, the most urgent last


class DynamicScale:
    """The loss scale S, which grows after `growth_interval` steps without overflow and shrinks after an overflow.

    S and its counters are tensors, on the first GPU on which a loss is scaled or gradients are checked, else on the
    CPU. They are updated in place, so each replay of a CUDA graph of a step updates them. The host reads them only when
    asked. Conditions that end a run (a scale at its floor) are copied to pinned host memory, which the host reads
    without waiting: on a GPU it raises an update or so later.

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
        scales = SMALLEST <= init_scale <= LARGEST and SMALLEST <= min_scale <= LARGEST
        if not scales or not hysteresis >= 1 or not growth_interval >= 1:
            raise LossScaleError(
                f"init_scale {init_scale}, min_scale {min_scale}, hysteresis {hysteresis}, growth_interval "
                f"{growth_interval} given; expected positive scales that float32 holds, hysteresis and growth_interval "
                "at least 1"
            )
        self._growth_factor, self._backoff_factor, self._growth_interval = (
            growth_factor,
            backoff_factor,
            growth_interval,
        )
        self._enabled, self._dynamic, self._min_scale, self._hysteresis = enabled, dynamic, min_scale, hysteresis
        self._overflowed: tuple[str, ...] = ()
        self._make(init_scale, [0, hysteresis, 0, 0])

    # ---- the tensors ------------------------------------------------------------------------------------------------

    def _make(self, scale: float, counts: list[int]) -> None:
        """Create the tensors on the CPU: S, and int64 counts of steps since the last growth or overflow, of overflows
        left until S is lowered, of steps skipped in a row and in all, and a message for the host."""
        self._scale = torch.full((), scale, dtype=torch.float32, device="cpu")
        self._counts = torch.tensor([*counts, 0], dtype=torch.int64, device="cpu")
        self._box = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._flagged: tuple[str, ...] = ()
        self._flags: torch.Tensor | None = None
        self._seen_skips = counts[-1]

    @staticmethod
    def _waits(device: torch.device) -> bool:
        """Whether the host would have to wait to read a tensor on that device: then none is read within a step."""
        return device.type == "cuda"

    def _move(self, device: torch.device) -> None:
        """Move the tensors to the gradients' device, if it is a GPU and they are on none yet."""
        if self._waits(device) and self._scale.device.type != device.type:
            self._scale = self._scale.to(device, non_blocking=True)
            self._counts = self._counts.to(device, non_blocking=True)
            self._flags = None if self._flags is None else self._flags.to(device, non_blocking=True)
            self._box = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)

    def _factor(self, device: torch.device) -> torch.Tensor:
        """S on that device, a float32 scalar."""
        self._move(device)
        return self._scale.to(device)

    def _adapt(self, found: torch.Tensor, names: tuple[str, ...], lost: torch.Tensor) -> None:
        """Update S and the counters after a step.

        Args:
            found: a float32 scalar, above 0 if the step is skipped.
            names, lost: the name of every gradient, and whether it was not finite.

        Raises:
            LossScaleError: no other scale can help, or another rank has no gradient; on a GPU, in an earlier step.
        """
        self._move(found.device)
        found, lost, waits = found.to(self._scale.device), lost.to(self._scale.device), self._waits(found.device)
        if waits:
            self._report()
        if self._flags is None or names != self._flagged:
            self._note_overflowed()
            self._flagged, self._flags = names, torch.zeros_like(lost)
        over = found > 0
        tracker, patience, consecutive, skipped, said = self._counts.unbind()
        scale, spent, grows = self._scale, *torch.zeros_like(over).expand(2)
        if self._dynamic:
            lower, higher = ((scale.double() * by).float() for by in (self._backoff_factor, self._growth_factor))
            spent, grows = over & (patience <= 1), ~over & (tracker + 1 == self._growth_interval)
            stuck = spent & (lower < self._min_scale)
            scale = torch.where(grows & higher.isfinite(), higher, torch.where(spent & ~stuck, lower, scale))
        else:
            stuck = over & (consecutive + 1 >= _MAX_STATIC_SKIPS)
        many = (over & (consecutive + 1 == _MANY_SKIPS)).long() * _MANY
        say = torch.where(found == NO_GRADIENT, _GRADIENTLESS, torch.where(stuck, _STUCK, many))
        counts = (
            torch.where(over | grows, 0, tracker + 1),
            torch.where(grows, self._hysteresis, patience - (over & ~spent).long() * self._dynamic),
            torch.where(over, consecutive + 1, 0),
            skipped + over,
            torch.maximum(said, say),
        )
        self._counts.copy_(torch.stack(counts))
        self._scale.copy_(scale)
        self._flags.copy_(torch.where(over, lost, self._flags))
        self._box.copy_(self._counts[-1:], non_blocking=True)
        if not waits:
            self._report()

    def _report(self) -> None:
        """Warn or raise, once, for a message that was copied to the host."""
        heard = int(self._box)
        if not heard:
            return
        self._box.zero_()
        self._counts[-1].zero_()
        if heard != _MANY:
            raise LossScaleError(self._stuck() if heard == _STUCK else no_gradient(elsewhere=True))
        first = f"{self.overflowed[0]} first" if self.overflowed else "another rank's"
        kind = "now" if self._dynamic else "constant"
        warnings.warn(
            f"{int(self._counts[2])} steps in a row were skipped, and no weight moved: gradients are infinite or "
            f"NaN ({first}), and the loss scale is {float(self._scale):g} {kind}. Where it began far too large, lower "
            "it (loss_scale = {init = 65536} of a recipe); else the forward pass itself overflows or makes NaN "
            "(halfstep.tracking.first_nonfinite names the first such tensor), or the data have it",
            stacklevel=4,
        )

    def _stuck(self) -> str:
        """The message for overflows that no other scale can avoid."""
        scale, names = float(self._scale), self.overflowed
        where, advice = f"at the loss scale's floor, {scale:g}", "No smaller one helps: "
        if not self._dynamic:
            where = f"at the constant loss scale {scale:g}"
            advice = "Try a smaller scale, or a dynamic one. If that does not help, "
        named = f" in {', '.join(names[:3])}" if names else ""
        return (
            f"the gradients are infinite or NaN{named} {where}, {int(self._counts[2])} steps in a row. {advice}"
            "the forward pass itself overflows or makes NaN. Look for the first non-finite activation "
            "(`halfstep train` names it), keep that module in float32, train in bf16 (recipe 'bf16-mixed'), "
            "or lower the learning rate"
        )

    # ---- counters and state -----------------------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped in all. Like `get_scale`, it waits for a GPU."""
        return int(self._counts[3])

    @skipped_steps.setter
    def skipped_steps(self, steps: int) -> None:
        self._note_overflowed()
        self._counts[3].fill_(steps)
        self._seen_skips = steps

    @property
    def overflowed(self) -> tuple[str, ...]:
        """The parameters whose gradients were not finite in the last skipped step."""
        self._note_overflowed()
        return self._overflowed

    def _note_overflowed(self) -> None:
        """Read the flags of gradients that were not finite, if a step was skipped since the last read."""
        if self._flags is not None and self._seen_skips != self.skipped_steps:
            self._seen_skips, flags = self.skipped_steps, self._flags.tolist()
            self._overflowed = tuple(name for name, lost in zip(self._flagged, flags, strict=True) if lost)

    def _scale_state(self) -> dict[str, Any]:
        """The five entries of torch.amp.GradScaler's state dict."""
        rule = self._growth_factor, self._backoff_factor, self._growth_interval
        return dict(zip(_FIVE, (float(self._scale), *rule, int(self._counts[0])), strict=True))

    def _load_scale(self, state: Mapping[str, Any], patience: int | None) -> None:
        self._scale.fill_(float32(float(state["scale"])))
        self._growth_factor, self._backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._counts[0].fill_(int(state["_growth_tracker"]))
        self._counts[1].fill_(self._hysteresis if patience is None else int(patience))

    # ---- torch.amp.GradScaler's accessors -------------------------------------------------------------------------

    def get_scale(self) -> float:
        """S, or 1 if disabled. On a GPU, reading it waits for all launched kernels."""
        return float(self._scale) if self._enabled else 1.0

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
    """Check that a state has torch's five keys and a positive, finite scale.

    Raises:
        LossScaleError: it does not.
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
            "this state out, and let the scale start over"
        )


def float32(value: float) -> float:
    """The value rounded to float32, as torch stores the scale; infinite beyond its range."""
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").float())
