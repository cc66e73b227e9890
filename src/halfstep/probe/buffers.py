"""What rounding a model's buffers changes, by itself: `model.to(dtype)` rounds them too, and recipes do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.probe.batch import Batch, call
from halfstep.probe.observe import observed
from halfstep.probe.suggest import pattern
from halfstep.probe.trial import Outputs, Reference, finite


_LEAST = 4
"""How many times the format's relative rounding error is more than a rounded tensor shows by itself."""


@dataclass(frozen=True)
class RoundedBuffer:
    """A buffer, and its counterparts in other blocks, rounded to a dtype with the rest of the model in float32."""

    name: str
    """Its path; numbers of blocks are globs."""
    error: float
    """The largest relative change of what a module returns, on the first batch."""
    module: str
    """The module whose output that is."""


@dataclass(frozen=True)
class Buffers:
    """What rounding the buffers of a model does, each kind by itself."""

    found: tuple[RoundedBuffer, ...] = ()
    """Every kind that rounding changes and does not overflow."""
    weights: float = 0.0
    """How far rounding all weights changes the model's output."""
    size: float = 0.0
    """The format's relative rounding error."""
    arrived: tuple[str, ...] = ()
    """Those that were rounded when the model came: float32 was measured with them."""

    @property
    def harmful(self) -> tuple[RoundedBuffer, ...]:
        """Those that change a module's output by more than rounding all weights changes the model's, and by more than
        four times the format's rounding error."""
        return tuple(one for one in self.found if not one.error <= max(self.weights, _LEAST * self.size))

    def lines(self, format: str) -> list[str]:
        """What a report says of them; nothing where none does harm."""
        said = [
            f"buffers: {one.name} rounded to {format}, as model.to() does, changes the output of "
            f"{one.module or 'the model'} by {one.error:.2g}; rounding all weights changes the model's by "
            f"{self.weights:.2g}. Errors of positions and frequencies grow with the length. Recipes leave buffers as "
            "they are, and one that names it in its float32_buffers refuses a model in which it was rounded"
            for one in self.harmful
        ]
        if self.arrived:
            said.append(
                f"buffers: {len(self.arrived)} arrived rounded to 16 bits ({self.arrived[0]}); what fp32 means here "
                "was measured with them: halfstep.audit says what to do"
            )
        return said


NONE = Buffers()


@torch.no_grad()
def rounded_buffers(
    model: nn.Module, batch: Batch, dtype: torch.dtype, expected: Reference
) -> tuple[RoundedBuffer, ...]:
    """What rounding each kind of floating-point buffer to `dtype` changes, by its path; kinds that it does not change,
    and those that overflow, are left out. The model is left as it was.

    Raises:
        ModelError: it raised.
    """
    kinds: dict[str, list[Tensor]] = {}
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not torch.equal(buffer, buffer.to(dtype).to(buffer.dtype)):
            kinds.setdefault(pattern(name), []).append(buffer)
    found = []
    for name, members in kinds.items():
        kept = [buffer.clone() for buffer in members]
        if not all(finite(buffer.to(dtype)) for buffer in members):
            continue
        for buffer in members:
            buffer.copy_(buffer.to(dtype))
        try:
            found.append(RoundedBuffer(name, *_changed(model, batch, expected)))
        finally:
            for buffer, value in zip(members, kept, strict=True):
                buffer.copy_(value)
    return tuple(found)


def _changed(model: nn.Module, batch: Batch, expected: Reference) -> tuple[float, str]:
    """The largest relative change of what a module returns, and which module's it is."""
    outputs = Outputs(expected)
    with observed(model, outputs.compare):
        call(model, batch)
    return max(((error, site.module) for site, error in outputs.errors.items()), default=(0.0, ""))
