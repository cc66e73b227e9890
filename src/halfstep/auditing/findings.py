"""What an audit has to say of a setup: losses, leftovers and oddities, each in a sentence with names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.auditing.live import rounds_to
from halfstep.auditing.report import Finding, Item
from halfstep.auditing.setup import Setup
from halfstep.auditing.updates import Unmoved, find_updates
from halfstep.nn.buffers import RECOMPUTE
from halfstep.recipe import PROJECTOR


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
        _frozen_norms(setup),
        _stray(setup),
        _foreign(setup),
        _not_stepped(setup),
        _no_gradient(setup),
        _nonfinite(items),
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
    found: dict[tuple[str, str, bool], list[str]] = {}
    for name, type in rounded.items():
        found.setdefault((stored[name], type, setup.saved[name]), []).append(name)
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


def _frozen_norms(setup: Setup) -> Iterator[Finding]:
    if setup.frozen_norms:
        text = "norms that do not train, where all other parameters of their blocks do"
        yield Finding("note", "frozen norm", text, setup.frozen_norms)


def _stray(setup: Setup) -> Iterator[Finding]:
    names = [
        name
        for name, master in setup.masters.items()
        if name in setup.parameters and _apart(master, setup.parameters[name])
    ]
    if names:
        text = "master copies that do not round to their parameters: one was loaded or written without the other"
        yield Finding("warning", "stray master", text, tuple(names))
    if setup.by_hand:
        text = (
            "float32 parameters of the optimizer that round to the model's, as master copies do: unless your loop "
            "copies them back after each step, the optimizer is stale"
        )
        yield Finding("note", "master by hand", text, tuple(setup.by_hand))


def _apart(master: Any, parameter: Tensor) -> bool:
    """Whether a float32 copy is of other values than its parameter."""
    whole = isinstance(master, Tensor) and master.dtype == torch.float32 and master.shape == parameter.shape
    return whole and not rounds_to(master, parameter)


def _foreign(setup: Setup) -> Iterator[Finding]:
    if setup.foreign:
        text = (
            "parameters of the optimizer that do not belong to the model, so its steps on them do nothing: build the "
            "optimizer after the model was copied or sharded, or its parameters replaced"
        )
        yield Finding("warning", "stale optimizer", text, tuple(setup.foreign))


def _not_stepped(setup: Setup) -> Iterator[Finding]:
    names = [] if setup.groups is None else [name for name in setup.trained if name not in setup.groups]
    if names:
        text = "parameters that require a gradient and are in no group of the optimizer, so never updated"
        yield Finding("warning", "not in the optimizer", text, tuple(names))


def _no_gradient(setup: Setup) -> Iterator[Finding]:
    names = [name for name, parameter in setup.trained.items() if parameter.grad is None]
    if names and len(names) < len(setup.trained):
        text = "parameters that require a gradient and have none, where others have one"
        yield Finding("warning", "no gradient", text, tuple(names))


def _nonfinite(items: Iterable[Item]) -> Iterator[Finding]:
    found = [item for item in items if item.nonfinite]
    if found:
        text = f"tensors with infinities or NaN, {sum(item.nonfinite for item in found):,} in all"
        yield Finding("warning", "not finite", text, tuple(item.label for item in found))


def _mixed(items: Iterable[Item]) -> Iterator[Finding]:
    """States of one name in several dtypes; those of fewest values are named."""
    kinds: dict[str, dict[str, list[Item]]] = {}
    for item in items:
        if item.kind not in ("parameters", "gradients", "buffers", "scales", "not the model's"):
            kinds.setdefault(item.kind, {}).setdefault(item.dtype, []).append(item)
    for kind, dtypes in kinds.items():
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
    by_kind: dict[str, list[Item]] = {}
    for item in items:
        if item.shared_with is not None:
            by_kind.setdefault(item.kind, []).append(item)
    for kind, found in by_kind.items():
        first = f"{found[0].label} is {found[0].shared_with}"
        text = f"{kind} in the memory of another tensor, counted once: {first}"
        yield Finding("note", "shared", text, tuple(item.name for item in found))
