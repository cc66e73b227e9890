"""`LossScaler`: torch.amp.GradScaler's interface and scales, with additions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from halfstep.errors import LossScaleError
from halfstep.optim.dynamic_scale import EXTRA, check_keys, float32
from halfstep.optim.gradients import narrow_all
from halfstep.optim.unscaling import Pending, Unscaling, versions
from halfstep.quant.tracing import untraced
from halfstep.recipe import RECIPE


__all__ = ["EXTRA", "Follower", "LossScaler"]

Outputs = TypeVar("Outputs", Tensor, list[Any], tuple[Any, ...], Iterable[Any])


class Follower(Protocol):
    """An object that advances with the scaler's updates and is saved with its state."""

    def advance(self, skipped: bool | Tensor = False) -> None:
        """End an optimizer step; `skipped`, a scalar tensor on a GPU, if gradients overflowed."""

    def state_dict(self) -> dict[str, Any]:
        """The entries to save; their names are not the scaler's."""

    def differs(self, saved: Mapping[str, Any]) -> str | None:
        """The recipe that a state was saved under, if it is another one and a change is allowed; else None.

        Raises:
            RecipeError: it is another recipe, and no change is allowed.
        """

    def begin(self, saved: Mapping[str, Any]) -> list[str]:
        """Go on from the state of another recipe; returns texts for a warning."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state; missing entries start over, with a warning."""


class LossScaler(Unscaling):
    """Multiplies the loss by S, divides the gradients by S, skips steps whose gradients overflowed, and adapts S.

    A drop-in replacement for `torch.amp.GradScaler`: the same methods, the same five state keys, the same scales step
    by step. In addition: a constant scale (`dynamic=False`), a floor (`min_scale`), DeepSpeed's `hysteresis`,
    `clip_grad_norm_`, the number of skipped steps, the names of the parameters that overflowed, and fp16 gradients.
    With optimizers that follow torch's protocol for it (halfstep's, torch's fused ones) the division by S happens
    inside the update.

    A copy or a pickle of a scaler holds a copy of the model whose scaling states it advances: copy both together. Use
    `state_dict` to save one.

    Args:
        device: accepted for compatibility; the scale is on the loss's device.
        init_scale: S at the start.
        growth_factor: the factor of S after `growth_interval` steps without overflow.
        backoff_factor: the factor of S after an overflow.
        enabled: False makes every method the identity, except `step` and `clip_grad_norm_`.
        dynamic: False keeps S constant; overflowing steps are skipped all the same.
        min_scale: an overflow at this scale is an error. torch has no floor: S falls to 0 and 1/S becomes infinite.
        hysteresis: the number of overflows that lower S (as in DeepSpeed, reset when S grows).
        names: the parameters' names, for `overflowed`.
        follower: an object to advance with every `update()` and to save with this state (a model's scaling states).
        process_group: the ranks that combine their overflow flags; None: the default group, if there is one.

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
        rule = init_scale, growth_factor, backoff_factor, growth_interval, enabled, dynamic, min_scale, hysteresis
        super().__init__(*rule, names=names, process_group=process_group)
        self._follower = follower

    # ---- the loop: scale, (unscale_ or clip_grad_norm_), step, update ---------------------------------------------

    def scale(self, outputs: Outputs) -> Outputs:
        """The loss (or a nested list or tuple of losses) times S, in float32 for a 0-d loss."""
        self._pending.mark_dropped()
        for optimizer in self._widened:
            narrow_all(optimizer)
        return self._scaled(outputs) if self._enabled else outputs

    def _scaled(self, outputs: Outputs) -> Outputs:
        if isinstance(outputs, Tensor):
            # A copy: autograd saves it, and an update before another backward through it would write to the scale.
            return outputs * self._factor(outputs.device).clone()
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self._scaled(output) for output in outputs)
        if isinstance(outputs, Iterable):
            return map(self._scaled, outputs)
        raise LossScaleError(f"scale() got {type(outputs).__name__}; expected a tensor or a sequence of tensors")

    @untraced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()` with unscaled gradients; nothing if one of them is infinite or NaN.

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
        found = self._check(optimizer, pending)
        if not pending.waits or not _divides(optimizer):
            skipped = bool(found)
            if not skipped and pending.stage == "ready" and not _divides(optimizer):
                self.unscale_(optimizer)
            if skipped or not _divides(optimizer):
                pending.stage = "stepped"
                return None if skipped else given.step(*args, **kwargs)
        optimizer.grad_scale = self._factor(found.device) if pending.stage == "ready" else None  # type: ignore[attr-defined]
        optimizer.found_inf = found  # type: ignore[attr-defined]
        pending.stage = "stepped"
        try:
            return given.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            if pending.waits:
                pending.versions = versions(optimizer)

    @untraced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt S to the overflows since the last update; call it once, after all optimizers' steps.

        If no optimizer has stepped (each was skipped, or its gradients were dropped), the model's scaling states drop
        the batch's amaxes instead of advancing.

        Raises:
            LossScaleError: neither `step` nor `unscale_` was called; or the gradients overflow at the scale's floor, or
                in too many steps in a row of a constant scale.
        """
        pending, moved = self._pending.take(), []
        for optimizer, one in pending:
            moved.append(one.moved(optimizer))
        if self._enabled:
            checked = [p for _, p in pending if p.found_inf is not None]
            if new_scale is not None:
                self._scale.fill_(float32(float(new_scale)))
            elif not checked:
                raise LossScaleError("update() before any step() or unscale_(); call it after scaler.step(optimizer)")
            else:
                self._move_on(checked)
        if self._follower is not None:
            self._follower.advance(_none(moved))

    def _move_on(self, checked: list[Pending]) -> None:
        """Adapt S to the combined overflow flags of the optimizers, on their device."""
        found = [p.found_inf for p in checked if p.found_inf is not None]
        lost = [p.lost for p in checked if p.lost is not None]
        there = found[0].device
        names = tuple(chain.from_iterable(p.names for p in checked))
        self._adapt(torch.stack([f.to(there) for f in found]).amax(), names, torch.cat([one.to(there) for one in lost]))

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys, unless disabled; and one more for the recipe's name and digest, the hysteresis, scaling
        states and the stage."""
        extra: dict[str, Any] = self._follower.state_dict() if self._follower is not None else {}
        if self._enabled and self._hysteresis > 1:
            extra["patience"] = int(self._counts[1])
        if (self._enabled or extra.keys() - {RECIPE}) and self._pending.any_stepped:
            warnings.warn(
                "the scaler's state was taken between step() and update(): a run that resumes from it never sees that "
                "update. Save after scaler.update()",
                stacklevel=2,
            )
        return (self._scale_state() if self._enabled else {}) | ({EXTRA: extra} if extra else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        Raises:
            RecipeError: the state names another recipe, and no change is allowed.
            LossScaleError: the state is empty (it was saved by a disabled scaler) or lacks a key; or it has scaling
                states of another model or recipe.
        """
        extra = state_dict.get(EXTRA, {})
        other = self._follower.differs(extra) if self._follower is not None else None
        if other is not None:
            self._begin_after(other, state_dict)
            return
        if self._enabled:
            check_keys(state_dict)
        if self._follower is not None:
            self._follower.load_state_dict(extra)
        if self._enabled:
            self._load_scale(state_dict, extra.get("patience"))

    def _begin_after(self, other: str, state: Mapping[str, Any]) -> None:
        """Go on from the state of another recipe, without its loss scale, and warn."""
        assert self._follower is not None
        told = self._follower.begin(state.get(EXTRA, {}))
        if self._enabled:
            told.append(f"the loss scale starts over at {self.get_scale():g}")
        elif "scale" in state:
            told.append(f"the loss scale, {state['scale']:g}, is dropped")
        if told:
            warnings.warn(
                f"the scaler's state was saved under {other}, and goes on under another recipe, as "
                f"recipe_change='allow' asks: {'; '.join(told)}",
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._pending:
            raise LossScaleError(
                "a scaler cannot be copied or pickled between unscale_(), clip_grad_norm_() or step() and update(), "
                "since the gradients would stay behind; do it after scaler.update()"
            )
        self._note_overflowed()
        left = ("_pending", "_widened", "_named", "_scale", "_counts", "_box", "_flagged", "_flags", "_seen_skips")
        numbers = float(self._scale), self._counts[:-1].tolist()
        return {name: value for name, value in vars(self).items() if name not in left} | {"numbers": numbers}

    def __deepcopy__(self, memo: dict[int, Any]) -> LossScaler:
        memo[id(self._process_group)] = self._process_group  # process groups cannot be copied
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "numbers"})
        self._make(*state["numbers"])
        self._forget()


def _divides(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides by `grad_scale` inside its update (torch's protocol for fused optimizers)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _none(moved: list[bool | Tensor]) -> bool | Tensor:
    """Whether there were optimizers and none of them has stepped; a scalar tensor if that is known on a GPU alone."""
    for one in moved:
        if one is True:
            return False
    if not moved:
        return False
    unread = [one for one in moved if isinstance(one, Tensor)]
    return ~torch.stack([one.to(unread[0].device) for one in unread]).any() if unread else True
