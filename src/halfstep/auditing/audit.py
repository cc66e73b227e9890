"""Audit a live training setup: who is who among its tensors, and one pass over the bits of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from halfstep import formats
from halfstep.auditing.findings import find
from halfstep.auditing.live import leaves, name_of, place, scanned, size, values
from halfstep.auditing.report import Audit, Item
from halfstep.auditing.setup import Setup, set_up
from halfstep.auditing.updates import Unmoved, unmoved_by
from halfstep.bits.narrowed import narrowed, progression
from halfstep.bits.origin import origin, stored_format
from halfstep.bits.scan import Scan
from halfstep.nn.stages import applied_in
from halfstep.ops import CodeTensor


class HasScale(Protocol):
    """A gradient scaler: torch's, or halfstep's."""

    def get_scale(self) -> float:
        """The loss scale."""


def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scaler: HasScale | None = None,
) -> Audit:
    """Every tensor that a training setup keeps, as it is stored and as its bits say, and what is wrong with it.

    Nothing is changed. Any model and any optimizer with torch's `param_groups` and `state` will do, or a list of those
    that step on the model, prepared by halfstep or not, also under DDP and FSDP2, where each rank reports its own part.
    Call it between backward() and step() to see the gradients too. It reads each value once, in pieces: no tensor is
    copied whole.

    Raises:
        ModelError: a parameter has no shape yet (torch's lazy modules).
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*(optimizer or ())]
    setup = set_up(model, *optimizers)
    items: list[Item] = []
    unmoved: dict[str, Unmoved] = {}
    rounded: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    storages: dict[tuple[object, ...], int] = {}
    for kind, name, tensor in _tensors(setup):
        at = place(tensor)
        shared = None if at is None else first.get(at)
        dtype, found = name_of(tensor.dtype), scanned(tensor) if shared is None else None
        said = None if found is None or kind == "scales" else _said(found, dtype)
        nonfinite = 0 if found is None or (kind == "buffers" and _masks(found)) else found.table.nonfinite
        role, shape = setup.roles.get(name, "other"), tuple(tensor.shape)
        zeros = 0 if found is None else found.table.zeros
        item = Item(kind, name, role, dtype, shape, values(tensor), size(tensor), said, nonfinite, shared, zeros)
        items.append(item)
        if at is not None:
            first.setdefault(at, item.label)
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
        if found is not None and setup.steps_on(kind, name) and (one := unmoved_by(setup, name, dtype, found.table)):
            unmoved[name] = one
        buffer = found if kind == "buffers" and name in setup.saved else None
        if buffer is not None and (narrow := narrowed(buffer, dtype) or progression(tensor)):
            rounded[name] = narrow
    counted = setup.trained or setup.parameters
    applied = applied_in(model)
    steps = setup.steps.values()
    scale = None if scaler is None else float(scaler.get_scale())
    return Audit(
        model=type(model).__name__,
        optimizer=" and ".join(dict.fromkeys(type(one).__name__ for one in optimizers)) or None,
        trained=sum(map(_numel, counted.values())),
        steps=(min(steps), max(steps)) if steps else None,
        loss_scale=scale,
        held=sum(storages.values()),
        items=tuple(items),
        findings=find(setup, items, unmoved, rounded, scale),
        stage=None if applied is None or applied.schedule is None else str(applied.schedule),
        plan=None if applied is None else applied.plan.text(storage=False),
    )


def _numel(parameter: Tensor) -> int:
    """How many of a parameter's values this rank has."""
    if isinstance(parameter, CodeTensor):
        return parameter.numel()
    return sum(tensor.numel() for _, tensor in leaves(parameter, ""))


def _masks(found: Scan) -> bool:
    """Whether a tensor is a mask that is added to scores: zeros and infinities."""
    return not found.table.nonzero and not found.table.nans


def _said(found: Scan, dtype: str) -> str:
    """What the bits say in a word; "full", too, where they fit no type, or one with no fewer significant bits."""
    said, stored = origin(found, dtype), stored_format(dtype)
    fewer = stored is None or any(_significant_bits(name) < stored.significant_bits for name in said.through)
    return said.key if (said.through and fewer) or said.key == "unknown" else "full"


def _significant_bits(name: str) -> int:
    """Of the values of what an origin names: a format, or integers of any number of bits, `int7`."""
    return int(name[3:]) if name.startswith("int") else formats.get(name).significant_bits


def _tensors(setup: Setup) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of all that a setup keeps, in the order of the report."""
    for name, parameter in setup.every:
        yield from ((path, name, tensor) for path, tensor in leaves(parameter, "parameters"))
    for name, parameter in setup.parameters.items():
        yield from ((path, name, tensor) for path, tensor in leaves(parameter.grad, "gradients"))
    for name, master in setup.by_hand.items():
        yield from ((path, name, tensor) for path, tensor in leaves(master, "master"))
    for name, stranger in setup.foreign.items():
        yield from ((path, name, tensor) for path, tensor in leaves(stranger, "not the model's"))
    for name, key, value in setup.states:
        yield from ((path, name, tensor) for path, tensor in leaves(value, key))
    for name, buffer in setup.buffers.items():
        kind = "scales" if setup.roles.get(name) == "scales" else "buffers"
        yield from ((path, name, tensor) for path, tensor in leaves(buffer, kind))
