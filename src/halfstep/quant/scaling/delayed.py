"""Scales as in FP8 libraries: of a tile from its own amax, or of a tensor from the amaxes of earlier steps."""

from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan

import torch
from torch import Tensor

from halfstep.errors import QuantizationError
from halfstep.formats import Format
from halfstep.quant.family import power_of_two
from halfstep.quant.scaling.base import Scaling, StatefulScaling, Stored, check_power
from halfstep.quant.tile import Tile
from halfstep.quant.tracing import has_memory


class Current(Scaling):
    """factor = max / amax in float32; elements are multiplied by it, and scale = 1 / factor.

    A tile of zeros has factor 1; an amax so small that the factor overflows has the largest float32. Unlike in the
    source, an infinity or NaN makes its tile NaN, so that it is noticed.

    Source: NVIDIA Transformer Engine, Float8CurrentScaling (amax_epsilon 0); torchao's tensorwise scaling.
    """

    multiplies = True
    reciprocal = True

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        factor = self.factor(tile.reduce(x.abs(), "amax").float(), element)
        return {"scale": factor.reciprocal()}, factor

    def factor(self, amax: Tensor, element: Format) -> Tensor:
        return factor_of(amax, element)


def factor_of(amax: Tensor, element: Format) -> Tensor:
    """max / amax in float32: 1 for an amax of 0, NaN for one that is not finite, at most the largest float32."""
    if amax.is_cpu and amax.dim() == 0 and has_memory(amax):
        # equal bits in one torch call
        return torch.scalar_tensor(number_of(amax.item(), element), dtype=torch.float32, device="cpu")
    # Divided in float64 and rounded once, which equals float32's division: CUDA's and a compiler's float32 division is
    # not always correctly rounded.
    factor = (element.max / amax.double()).clamp(max=torch.finfo(torch.float32).max).float()
    # NaN where amax is infinite or NaN. A NaN constant, which never compares equal, would keep compilers from merging
    # equal computations.
    lost = amax - amax
    return torch.where(amax.isfinite(), torch.where(amax == 0, 1.0, factor), lost)


def number_of(amax: float, element: Format) -> float:
    """`factor_of` one amax, as a Python float, not yet rounded to float32."""
    return 1.0 if amax == 0 else min(element.max / amax, torch.finfo(torch.float32).max) if isfinite(amax) else nan


current = Current("current")


@dataclass(frozen=True)
class Delayed(StatefulScaling):
    """factor = max / a / 2^margin, with a the largest (`max`) or the last (`most_recent`) amax of `history` steps.

    The state of an operand is a float32 tensor of 1 + history: the factor in use, the amax of the current step, then
    the earlier steps', oldest first. A factor of 0 means just-in-time scaling: until the state is advanced, each tensor
    is scaled by its own amax. A step of zeros does not enter the history, nor does an amax that is not finite: the
    factor then follows the steps before it. Values that outgrow the history saturate.

    Source: NVIDIA Transformer Engine, DelayedScaling and its delayed_scaling.cu; the defaults are its own except for
    `warmup`: its first step has factor 1 (`warmup` 0), under which small activations and gradients vanish, so that only
    one more layer per step passes values on. MS-AMP's ScalingMeta for a longer `warmup` and `restart`.
    """

    history: int = 1024
    algorithm: str = "max"
    margin: int = 0
    power_of_two: bool = False
    """Round the factor down to a power of two."""
    warmup: int = 1
    """The number of steps, of those that enter the history, in which tensors are scaled just in time."""
    restart: bool = False
    """Whether an amax that is not finite empties the history, so that `warmup` starts over."""

    multiplies = True

    @cached_property
    def first(self) -> Scaling | None:  # type: ignore[override]
        return None if self.margin or self.power_of_two else current

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.first  # cached now, since a traced graph cannot fill a cached property
        check_power(self, "margin")
        if self.history < 1 or self.algorithm not in ("max", "most_recent"):
            raise QuantizationError(
                f"delayed scaling with history {self.history} and algorithm {self.algorithm!r}: expected at least 1, "
                "and max or most_recent"
            )
        if not 0 <= self.warmup <= self.history:
            raise QuantizationError(
                f"delayed scaling with warmup {self.warmup} and history {self.history}: expected a number of steps, "
                "from 0 (the first step has factor 1) to the whole history"
            )

    def init(self, device: torch.device | str | None = None) -> Tensor:
        state = torch.zeros(1 + self.history, dtype=torch.float32, device=device)
        state[:1] = 0.0 if self.warmup else 1.0  # a slice: writing one element would synchronize a GPU
        return state

    def waits(self, state: Tensor) -> bool:
        if not self.warmup or not state.is_cpu or not has_memory(state):
            return self.warmup > 0  # on a GPU reading it would synchronize, and a graph is traced once for all steps
        return not state[0].item()

    def in_use(self, state: Tensor, amax: Tensor | None, element: Format) -> Tensor:
        return state[0].clone() if amax is None else torch.where(state[0] == 0, self._factor(amax, element), state[0])

    def advance(self, states: Tensor, element: Format) -> None:
        factors, kept = states[..., :1], states[..., 1:]
        usual = kept.isfinite()  # a history loaded from an older file may hold others
        history = torch.where(usual, kept, 0.0)
        current = history[..., :1].clone()
        amax = current if self.algorithm == "most_recent" else history.amax(-1, keepdim=True)
        warm = ((history != 0).sum(-1, keepdim=True) >= self.warmup) | (factors != 0)
        factors.copy_(torch.where(warm & (amax > 0), self._factor(amax, element), factors))
        moved = history.roll(-1, -1)  # this step's amax becomes the last; the oldest is dropped
        moved[..., 0] = 0
        kept.copy_(torch.where(current != 0, moved, history))
        if self.restart:
            states.copy_(torch.where(usual[..., :1], states, 0.0))

    def _factor(self, amax: Tensor, element: Format) -> Tensor:
        factor = factor_of(amax, element) / 2.0**self.margin
        if not self.power_of_two:
            return factor
        return torch.where(factor.isfinite(), power_of_two(torch.frexp(factor)[1].long() - 1).float(), torch.nan)

    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        raise QuantizationError(
            "delayed scaling needs the amaxes of earlier steps, which a single tensor does not have: train with a "
            "recipe that uses it, or quantise with scale='current'"
        )


delayed = Delayed("delayed")
