"""One scale a tensor from the largest magnitudes of earlier steps, so that a tensor is read once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.errors import QuantizationError
from halfstep.formats import Format
from halfstep.quant.family.floating import power_of_two
from halfstep.quant.scaling.base import StatefulScaling, Stored
from halfstep.quant.scaling.current import factor_of
from halfstep.quant.tile import Tile


@dataclass(frozen=True)
class Delayed(StatefulScaling):
    """factor = max / a / 2^margin, with a the largest (`max`) or the last (`most_recent`) amax of `history` steps.

    The state of an operand is a float32 tensor of 1 + history: the factor in use, the amax of the step that runs, then
    the steps before it, oldest first. A step of zeros does not enter the history; an amax that is 0 or not finite
    leaves the factor as it is. The first step has factor 1, and what outgrows its history saturates.

    Source: NVIDIA Transformer Engine, DelayedScaling and its delayed_scaling.cu; the defaults are its own. MS-AMP's
    ScalingMeta for `warmup`.
    """

    history: int = 1024
    algorithm: str = "max"
    margin: int = 0
    power_of_two: bool = False
    """Round the factor down to a power of two."""
    warmup: bool = False
    """Until `history` steps are in, a tensor is scaled by its own amax (a state's factor is 0 then), and an amax that
    is not finite empties the history: it starts over."""

    multiplies = True

    @property
    def waits(self) -> bool:
        return self.warmup

    def __post_init__(self) -> None:
        if self.history < 1 or self.algorithm not in ("max", "most_recent"):
            raise QuantizationError(
                f"delayed scaling with history {self.history} and algorithm {self.algorithm!r}: expected at least 1, "
                "and max or most_recent"
            )

    def init(self, device: torch.device | str | None = None) -> Tensor:
        state = torch.zeros(1 + self.history, device=device)
        state[0] = 0.0 if self.warmup else 1.0
        return state

    def in_use(self, state: Tensor, amax: Tensor | None, element: Format) -> Tensor:
        if amax is None:
            return state[0].clone()
        return torch.where(state[0] == 0, self._factor(amax, element), state[0])

    def advance(self, state: Tensor, element: Format) -> None:
        current, history = state[1].clone(), state[1:].clone()
        amax = current if self.algorithm == "most_recent" else history.amax()
        usable = amax.isfinite() & (amax > 0)
        if self.warmup:
            usable &= (history != 0).all() | (state[0] != 0)
        state[0] = torch.where(usable, self._factor(amax, element), state[0])
        moved = history.roll(-1)  # this step's amax becomes the last, and the oldest gives its place to the next step's
        moved[0] = 0
        state[1:] = torch.where(current != 0, moved, history)
        if self.warmup:
            state.copy_(torch.where(current.isfinite(), state, 0.0))

    def _factor(self, amax: Tensor, element: Format) -> Tensor:
        factor = factor_of(amax, element) / 2.0**self.margin
        if not self.power_of_two:
            return factor
        rounded = power_of_two(torch.frexp(factor)[1].long() - 1).float()
        return torch.where(factor.isfinite(), rounded, torch.nan)

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        raise QuantizationError(
            "delayed scaling needs the amaxes of earlier steps, which a single tensor does not have: train with a "
            "recipe that uses it, or quantise with scale='current'"
        )

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        return stored["scale"]


delayed = Delayed("delayed")
