"""What `model.to(dtype)` does: weights, buffers and inputs cast, forward, no recipe; and rounded buffers alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.grouping import grouped
from halfstep.probe.batch import Batch, call, moved
from halfstep.probe.observe import Site, observed
from halfstep.probe.suggest import pattern
from halfstep.probe.trial import Failure, Outputs, Ran, Reference, crash, finite


@dataclass(frozen=True)
class CastTrial(Ran):
    """How a model did that was cast as a whole."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The call that does it."""
        return f"model.to({self.dtype})"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.told({"dtype": str(self.dtype).removeprefix("torch.")}, {})


@torch.no_grad()
def cast_trial(model: nn.Module, batches: Sequence[Batch], dtype: torch.dtype, expected: Reference) -> CastTrial:
    """Cast a copy of the model, and the batches, and run it forward over all of them.

    It fails at the first parameter, buffer, input or output that is finite in float32 and not in `dtype`, and where the
    model's output is off by more than `OUTPUT_ERROR`. What torch cannot run in `dtype` has crashed.
    """
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    stored = [*model.named_parameters(), *model.named_buffers()]
    inputs = [(f"input {name}", tensor) for batch in batches for name, tensor in _named(batch)]
    overflows = (_overflow(name, tensor, dtype, kinds) for name, tensor in [*stored, *inputs])
    failure = next((found for found in overflows if found is not None), None)
    device = next(model.parameters()).device
    own, look = copy.deepcopy(model).to(dtype), _Look(Outputs(expected))
    for batch in batches:
        with observed(own, look):
            try:
                call(own, moved(batch, device, dtype))
            except ModelError as error:
                failure = failure or look.failure or crash(model, error)
        look.compares = False
    failure = failure or look.failure or look.outputs.failure()
    return CastTrial(failure, look.outputs.by_module, dtype)


@dataclass
class _Look:
    """What the outputs of a pass show: the first that is not finite, and how far each is off."""

    outputs: Outputs
    compares: bool = True  # the first batch alone
    failure: Failure | None = None

    def __call__(self, site: Site, tensor: Tensor) -> None:
        if self.failure is None and site.role == "output" and not finite(tensor):
            self.failure = Failure(site, "not finite")
        if self.compares:
            self.outputs.compare(site, tensor)


def _named(batch: Batch) -> list[tuple[object, Tensor]]:
    """The tensors that a batch is made of, by name or position."""
    if isinstance(batch, Mapping):
        return [(name, value) for name, value in batch.items() if isinstance(value, Tensor)]
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    return [(number, value) for number, value in enumerate(parts) if isinstance(value, Tensor)]


def _overflow(name: str, tensor: Tensor, dtype: torch.dtype, kinds: Mapping[str, str]) -> Failure | None:
    path, _, role = name.rpartition(".")
    if not tensor.is_floating_point() or not finite(tensor) or finite(tensor.to(dtype)):
        return None
    return Failure(Site(path, kinds.get(path, ""), role), f"its largest, {float(tensor.abs().max()):g}, overflows")


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
    kinds = grouped(
        (pattern(name), buffer)
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and not torch.equal(buffer, buffer.to(dtype).to(buffer.dtype))
    )
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
