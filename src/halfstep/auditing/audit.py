"""Audit a live training setup: who is who among its tensors, and one pass over the bits of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halfstep import formats
from halfstep.auditing.report import Audit, Finding, Item
from halfstep.auditing.setup import Setup, leaves, name_of, place, rounds_to, scanned, set_up, size, values
from halfstep.auditing.updates import Unmoved, find_updates, unmoved_by
from halfstep.bits.origin import narrowed, origin, progression, stored_format
from halfstep.bits.scan import Scan
from halfstep.grouping import grouped
from halfstep.nn.dtypes import RECOMPUTE
from halfstep.nn.stages import applied_in
from halfstep.ops import CodeTensor
from halfstep.recipe import PROJECTOR


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
        zeros, nonfinite = (0, 0) if found is None else (found.table.zeros, found.table.nonfinite)
        if kind == "buffers" and found is not None and not found.table.nonzero and not found.table.nans:
            nonfinite = 0  # zeros and infinities: a mask that is added to scores
        role, shape = setup.roles.get(name, "other"), tuple(tensor.shape)

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
    kinds = {name: "scales" if setup.roles.get(name) == "scales" else "buffers" for name in setup.buffers}
    kept: list[tuple[str, Any, str]] = [
        *((name, parameter, "parameters") for name, parameter in setup.every),
        *((name, parameter.grad, "gradients") for name, parameter in setup.parameters.items()),
        *((name, master, "master") for name, master in setup.by_hand.items()),
        *((name, stranger, "not the model's") for name, stranger in setup.foreign.items()),
        *((name, value, key) for name, key, value in setup.states),
        *((name, buffer, kinds[name]) for name, buffer in setup.buffers.items()),
    ]
    for name, value, kind in kept:
        yield from ((path, name, tensor) for path, tensor in leaves(value, kind))


def find(
    setup: Setup,
    items: Sequence[Item],
    unmoved: Mapping[str, Unmoved],
    rounded: Mapping[str, str],
    loss_scale: float | None,
) -> tuple[Finding, ...]:
    """All findings, warnings first; `rounded` has the buffers whose values were rounded to a type of 16 bits."""
    looked = (
        find_updates(setup, items, unmoved, loss_scale),
        _lost(setup, items),
        _rounded(setup, items, rounded),
        (one for one in _of_tensors(setup, items) if one.tensors),
        _mixed(items),
        _shared(items),
        _projected(setup),
    )
    return tuple(sorted((one for found in looked for one in found), key=lambda one: one.level != "warning"))


def _lost(setup: Setup, items: Sequence[Item]) -> Iterator[Finding]:
    """Trained in float32, yet on a narrower grid."""
    found: dict[tuple[bool, bool, str], list[str]] = {}
    for item in items:
        master = item.kind == "master"
        full = item.dtype == "float32" and (master or (item.kind == "parameters" and item.name in setup.trained))
        if full and item.effective not in (None, "full", "unknown") and not str(item.effective).startswith("partly"):
            stepped = setup.steps.get(item.name, 0) > 0
            found.setdefault((master, stepped, str(item.effective)), []).append(item.name)
    for (master, stepped, kind), names in found.items():
        what = f"{'master copies' if master else 'trained parameters'} in float32, every value exactly {kind}"
        if stepped:
            text = f"{what} after optimizer steps: a resume or a cast lost their float32 values (or lr was 0 so far)"
            yield Finding("warning", "float32 lost", text, tuple(names))
        else:
            text = f"{what}, no step counted: loaded from {kind}. If this is a resume, their float32 values were lost"
            yield Finding("note", "started narrow", text, tuple(names))


def _rounded(setup: Setup, items: Iterable[Item], rounded: Mapping[str, str]) -> Iterator[Finding]:
    """Buffers whose values a cast has rounded: those stored in 16 bits, and those that are float32 again."""
    stored = {item.name: item.dtype for item in items if item.kind == "buffers" and item.name in rounded}
    found = grouped(((stored[name], type, setup.saved[name]), name) for name, type in rounded.items())
    wide = bool(setup.masters) or any(p.dtype == torch.float32 for p in setup.trained.values())
    for (dtype, type, saved), names in found.items():
        if dtype == "float32":
            text = (
                f"buffers in float32, every value exactly {type}: a cast, or the file that they came from, rounded them"
            )
            noted = saved
        else:
            text = f"buffers in {dtype}" + (" beside weights kept in float32" if wide else "") + ": a cast rounded them"
            noted = not wide
        yield Finding("note" if noted else "warning", "rounded buffers", f"{text}; {RECOMPUTE}", tuple(names))


def _of_tensors(setup: Setup, items: Sequence[Item]) -> Iterator[Finding]:
    """The findings that say the same of all their tensors; one without tensors is none."""
    missing = tuple(name for name, parameter in setup.trained.items() if parameter.grad is None)
    broken = [item for item in items if item.nonfinite]
    yield Finding(
        "note", "frozen norm", "norms that do not train, where all other parameters of their blocks do",
        setup.frozen_norms,
    )  # fmt: skip
    yield Finding(
        "warning",
        "stray master",
        "master copies that do not round to their parameters: one was loaded or written without the other",
        tuple(name for name, master in setup.masters.items() if _apart(master, setup.parameters.get(name))),
    )
    yield Finding(
        "note",
        "master by hand",
        "float32 parameters of the optimizer that round to the model's, as master copies do: unless your loop copies "
        "them back after each step, the optimizer is stale",
        tuple(setup.by_hand),
    )
    yield Finding(
        "warning",
        "stale optimizer",
        "parameters of the optimizer that do not belong to the model, so its steps on them do nothing: build the "
        "optimizer after the model was copied or sharded, or its parameters replaced",
        tuple(setup.foreign),
    )
    yield Finding(
        "warning",
        "not in the optimizer",
        "parameters that require a gradient and are in no group of the optimizer, so never updated",
        tuple(name for name in setup.trained if setup.groups is not None and name not in setup.groups),
    )
    yield Finding(
        "warning",
        "no gradient",
        "parameters that require a gradient and have none, where others have one",
        missing if len(missing) < len(setup.trained) else (),
    )
    yield Finding(
        "warning",
        "not finite",
        f"tensors with infinities or NaN, {sum(item.nonfinite for item in broken):,} in all",
        tuple(item.label for item in broken),
    )


def _apart(master: Any, parameter: Tensor | None) -> bool:
    """Whether a float32 copy is of other values than its parameter."""
    if parameter is None or not isinstance(master, Tensor) or master.dtype != torch.float32:
        return False
    return master.shape == parameter.shape and not rounds_to(master, parameter)


def _mixed(items: Iterable[Item]) -> Iterator[Finding]:
    """States of one name in several dtypes; those of fewest values are named."""
    others = ("parameters", "gradients", "buffers", "scales", "not the model's")
    for kind, states in grouped((item.kind, item) for item in items if item.kind not in others).items():
        dtypes = grouped((item.dtype, item) for item in states)
        if len(dtypes) > 1:
            counts = ", ".join(f"{len(found)} in {dtype}" for dtype, found in dtypes.items())
            dtype, fewest = min(dtypes.items(), key=lambda pair: len(pair[1]))
            text = f"{kind} is not stored alike everywhere: {counts}. In {dtype}"
            yield Finding("note", "mixed states", text, tuple(item.name for item in fewest))


def _projected(setup: Setup) -> Iterator[Finding]:
    """Which matrices are updated in subspaces of their gradients, and which are not."""
    names = [name for name, key, _ in setup.states if key == PROJECTOR]
    if names:
        whole = [name for name, p in setup.trained.items() if p.dim() == 2 and name not in names]
        others = f", others ({', '.join(whole[:5])}{' ...' * (len(whole) > 5)}) as a whole" if whole else ""
        text = f"matrices updated in subspaces of their gradients (GaLore){others}"
        yield Finding("note", "projected", text, tuple(names))


def _shared(items: Iterable[Item]) -> Iterator[Finding]:
    for kind, found in grouped((item.kind, item) for item in items if item.shared_with is not None).items():
        first = f"{found[0].label} is {found[0].shared_with}"
        text = f"{kind} in the memory of another tensor, counted once: {first}"
        yield Finding("note", "shared", text, tuple(item.name for item in found))
