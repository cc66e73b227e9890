"""What watchers of an optimizer are told."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """What one update wanted of a parameter and what became of it, in float32."""

    weight: Tensor
    before: Tensor
    """All that was stored of the weight, its master included."""
    wanted: Tensor
    """The rule's step."""
    effective: Tensor
    """All that is stored of the weight after the step, less what was stored before."""
