"""Weights whose memory is codes: what the optimizer reads and writes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfstep.ops import CodeTensor, decode_scaled, encode_scaled
from halfstep.quant.masters import Kept, Master
from halfstep.recipe import SCALED, SCALED_MASTER, Scaled


_MASTER_SCALE = "master_scale"


@dataclass(frozen=True)
class ScaledWeight(Master):
    """The codes take the update: decoded, moved in float32, and encoded with a new scale.

    Source: MS-AMP, LBAdamW.
    """

    dtype: torch.dtype
    """Of the codes."""
    grads: torch.dtype

    def stored(self, weight: Tensor) -> Tensor:
        return weight.values() if isinstance(weight, CodeTensor) else super().stored(weight)

    def gradient(self, grad: Tensor) -> Tensor:
        if isinstance(grad, CodeTensor):
            return grad.values()
        return decode_scaled(*encode_scaled(grad.detach(), self.grads))

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        self.write(weight, {}, full)
        return {}

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return self.stored(weight)

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        assert isinstance(weight, CodeTensor)
        weight.write(updated)

    def follow(self, weight: Tensor, kept: Kept) -> None:
        """Nothing is kept beside the weight."""


@dataclass(frozen=True)
class ScaledMaster(ScaledWeight):
    """Wider codes in the optimizer's state take the update, with a scale of their own; the weight is their image."""

    keeps: ClassVar = {SCALED_MASTER: torch.float16, _MASTER_SCALE: torch.float32}
    costly: ClassVar = True

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        kept = {SCALED_MASTER: torch.empty_like(weight, dtype=torch.float16), _MASTER_SCALE: full.new_ones(())}
        self.write(weight, kept, full)
        return kept

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        return decode_scaled(kept[SCALED_MASTER], kept[_MASTER_SCALE])

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        self._keep(kept, updated)
        super().write(weight, kept, self.read(weight, kept))

    def follow(self, weight: Tensor, kept: Kept) -> None:
        full, now = self.read(weight, kept), self.stored(weight)
        changed = decode_scaled(*encode_scaled(full, self.dtype)) != now
        if bool(changed.any()):
            self._keep(kept, torch.where(changed, now, full))

    def _keep(self, kept: Kept, full: Tensor) -> None:
        codes, scale = encode_scaled(full, torch.float16)
        kept[SCALED_MASTER].copy_(codes)
        kept[_MASTER_SCALE].copy_(scale)


def scaled_weight(scaled: Scaled) -> ScaledWeight:
    """How the optimizer reads and writes a weight kept so."""
    kind = ScaledWeight if scaled.master is None else ScaledMaster
    return kind("scaled", SCALED[scaled.weights], SCALED[scaled.grads])
