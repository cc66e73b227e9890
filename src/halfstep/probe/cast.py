"""Run a model as `model.to(dtype)` makes it: weights, buffers and inputs cast, forward, and no recipe."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.probe.batch import Batch, call, moved
from halfstep.probe.observe import observed
from halfstep.probe.ranges import Site
from halfstep.probe.trial import Failure, Outputs, Reference, crash, finite


@dataclass(frozen=True)
class CastTrial:
    """How a model did that was cast as a whole."""

    dtype: torch.dtype
    failure: Failure | None
    """None: it passed."""
    errors: dict[str, float]
    """The relative error of each module's output on the first batch, in the order of execution; the model's last."""

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        return self.failure is None

    @property
    def output_error(self) -> float:
        """The relative error of what the model returned."""
        return self.errors.get("", math.inf)

    @property
    def name(self) -> str:
        """The call that does it."""
        return f"model.to({self.dtype})"


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
    return CastTrial(dtype, failure, look.outputs.by_module)


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
