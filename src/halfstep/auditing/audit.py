"""Audit a live training setup: identify its tensors, and read the bits of each once."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halfstep import formats
from halfstep.auditing.report import Audit, Finding, Item
from halfstep.auditing.setup import Setup, kept_as, leaves, name_of, place, rounds_to, scanned, set_up, size, values
from halfstep.bits.origin import narrowed, origin, progression, stored_format
from halfstep.bits.scan import Scan
from halfstep.bits.table import Table
from halfstep.nn.codes import RECOMPUTE
from halfstep.nn.stages import applied_in
from halfstep.ops import CodeTensor
from halfstep.recipe import PROJECTOR
from halfstep.text import grouped, percent


class HasScale(Protocol):
    """A gradient scaler: torch's, or halfstep's."""

    def get_scale(self) -> float:
        """The loss scale."""


def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scaler: HasScale | None = None,
) -> Audit:
    """A report on every tensor of a training setup: its dtype as stored, its precision by its bits, and what is wrong
    with it.

    Nothing is changed. Any model works, and any optimizer with torch's `param_groups` and `state`, or a list of those
    that step the model, prepared by halfstep or not, also under DDP and FSDP2, where each rank reports its own shards.
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
            nonfinite = 0  # zeros and infinities only: an additive attention mask
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
    """The number of a parameter's values on this rank."""
    if isinstance(parameter, CodeTensor):
        return parameter.numel()
    return sum(tensor.numel() for _, tensor in leaves(parameter, ""))


def _said(found: Scan, dtype: str) -> str:
    """The verdict of the bits in a word; "full" also if the values fit no type, or one with no fewer significant
    bits."""
    said, stored = origin(found, dtype), stored_format(dtype)
    fewer = stored is None or any(_significant_bits(name) < stored.significant_bits for name in said.through)
    return said.key if (said.through and fewer) or said.key == "unknown" else "full"


def _significant_bits(name: str) -> int:
    """The significant bits of an origin's type: a format, or integers of any number of bits such as `int7`."""
    return int(name[3:]) if name.startswith("int") else formats.get(name).significant_bits


def _tensors(setup: Setup) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of everything that a setup stores, in the order of the report."""
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
    unmoved: "Mapping[str, Unmoved]",
    rounded: Mapping[str, str],
    loss_scale: float | None,
) -> tuple[Finding, ...]:
    """All findings, warnings first. `rounded`: the buffers whose values were rounded to a 16-bit type."""
    return tuple(
        sorted(
            chain(
                _no_master(setup, unmoved),
                _too_small(unmoved),
                _stalled_averages(setup, items),
                _vanished_squares(setup, items),
                _zero_gradients(setup, items),
                _scale(loss_scale),
                _outside_autocast(setup, items),
                _float32_lost(setup, items),
                _rounded(setup, items, rounded),
                (one for one in _of_tensors(setup, items) if one.tensors),
                _mixed(items),
                _shared(items),
                _projected(setup),
            ),
            key=lambda one: one.level != "warning",
        )
    )


def _float32_lost(setup: Setup, items: Sequence[Item]) -> Iterator[Finding]:
    """Parameters trained in float32 whose values lie on a narrower grid."""
    found = grouped(
        ((item.kind, setup.steps.get(item.name, 0) > 0, str(item.effective)), item.name)
        for item in items
        if item.dtype == "float32"
        and (item.kind == "master" or (item.kind == "parameters" and item.name in setup.trained))
        and item.effective not in (None, "full", "unknown")
        and not str(item.effective).startswith("partly")
    )
    for (kind, stepped, said), names in found.items():
        what = f"{'master copies' if kind == 'master' else 'trained parameters'} in float32, every value exactly {said}"
        if stepped:
            text = f"{what} after optimizer steps: a resume or a cast lost their float32 values (or lr was 0 so far)"
            yield Finding("warning", "float32 lost", text, tuple(names))
        else:
            text = f"{what}, no step counted: loaded from {said}. If this is a resume, their float32 values were lost"
            yield Finding("note", "started narrow", text, tuple(names))


def _rounded(setup: Setup, items: Iterable[Item], rounded: Mapping[str, str]) -> Iterator[Finding]:
    """Buffers whose values a cast has rounded: those stored in 16 bits, and those that are float32 again."""
    stored = {item.name: item.dtype for item in items if item.kind == "buffers" and item.name in rounded}
    found = grouped(((stored[name], type, setup.saved[name]), name) for name, type in rounded.items())
    wide = bool(setup.masters) or any(p.dtype == torch.float32 for p in setup.trained.values())
    beside = " beside weights kept in float32" if wide else ""
    for (dtype, type, saved), names in found.items():
        again = dtype == "float32"
        how = (
            f", every value exactly {type}: a cast, or the file that they came from," if again else f"{beside}: a cast"
        )
        noted = saved if again else not wide
        text = f"buffers in {dtype}{how} rounded them; {RECOMPUTE}"
        yield Finding("note" if noted else "warning", "rounded buffers", text, tuple(names))


def _of_tensors(setup: Setup, items: Sequence[Item]) -> tuple[Finding, ...]:
    """Findings that make one statement about a group of tensors; those without tensors are dropped."""
    missing = tuple(name for name, parameter in setup.trained.items() if parameter.grad is None)
    broken = [item for item in items if item.nonfinite]
    return (
        Finding(
            "note",
            "frozen norm",
            "norms that are frozen while all other parameters of their blocks train",
            setup.frozen_norms,
        ),
        Finding(
            "warning",
            "stray master",
            "master copies that do not round to their parameters: one was loaded or written without the other",
            tuple(name for name, master in setup.masters.items() if _differs(master, setup.parameters.get(name))),
        ),
        Finding(
            "note",
            "master by hand",
            "float32 parameters of the optimizer that round to the model's, as master copies do: unless your loop "
            "copies them back after each step, the optimizer is stale",
            tuple(setup.by_hand),
        ),
        Finding(
            "warning",
            "stale optimizer",
            "parameters of the optimizer that do not belong to the model, so its steps on them do nothing: build the "
            "optimizer after the model was copied or sharded, or its parameters replaced",
            tuple(setup.foreign),
        ),
        Finding(
            "warning",
            "not in the optimizer",
            "parameters that require a gradient and are in no group of the optimizer, so never updated",
            tuple(name for name in setup.trained if setup.groups is not None and name not in setup.groups),
        ),
        Finding(
            "warning",
            "no gradient",
            "parameters that require a gradient and have none, while others have one",
            missing if len(missing) < len(setup.trained) else (),
        ),
        Finding(
            "warning",
            "not finite",
            f"tensors with infinities or NaN, {sum(item.nonfinite for item in broken):,} in all",
            tuple(item.label for item in broken),
        ),
    )


def _differs(master: Any, parameter: Tensor | None) -> bool:
    """Whether a float32 copy differs from its parameter by more than rounding."""
    if parameter is None or not isinstance(master, Tensor) or master.dtype != torch.float32:
        return False
    return master.shape == parameter.shape and not rounds_to(master, parameter)


def _mixed(items: Iterable[Item]) -> Iterator[Finding]:
    """States of one name that have several dtypes; the dtypes with fewest values are named."""
    others = ("parameters", "gradients", "buffers", "scales", "not the model's")
    for kind, states in grouped((item.kind, item) for item in items if item.kind not in others).items():
        dtypes = grouped((item.dtype, item) for item in states)
        if len(dtypes) > 1:
            counts = ", ".join(f"{len(found)} in {dtype}" for dtype, found in dtypes.items())
            dtype, fewest = min(dtypes.items(), key=lambda pair: len(pair[1]))
            text = f"{kind} has several dtypes: {counts}. In {dtype}"
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


SMALLEST_SCALE = 1e-6
"""Loss scales below this have been halved 36 times from 65536: in a working setup not that many steps overflow."""

_MOST = 0.5  # the share of unchanged values from which a tensor is reported


@dataclass(frozen=True)
class Unmoved:
    """How many values of one parameter an update of the size of the learning rate would leave unchanged."""

    dtype: str
    rate: float
    role: str
    lost: int
    nonzero: int


def unmoved_by(setup: Setup, name: str, dtype: str, table: Table) -> Unmoved | None:
    """The values that Adam's steps, about as large as the learning rate, leave unchanged; None for other optimizers."""
    stored, group = stored_format(dtype), (setup.groups or {})[name]
    rate = float(group.get("lr", 0.0))
    if "betas" not in group or not rate or stored is None:
        return None
    if dtype == "float32":  # a schedule may begin or end near zero
        rate = max(rate, *(float(group.get(peak, 0.0)) for peak in ("initial_lr", "max_lr")))
    return Unmoved(dtype, rate, setup.roles[name], table.unmoved(stored, rate), table.nonzero)


def _no_master(setup: Setup, unmoved: Mapping[str, Unmoved]) -> Iterator[Finding]:
    by_dtype = grouped((name_of(kept_as(parameter)), name) for name, parameter in setup.narrow.items())
    for dtype, names in by_dtype.items():
        share = _shares([unmoved[name] for name in names if name in unmoved])
        text = f"trained parameters in {dtype} without a master copy: an update below half their spacing is lost{share}"
        yield Finding("warning", "no master", text, tuple(names))


def _too_small(unmoved: Mapping[str, Unmoved]) -> Iterator[Finding]:
    found = {name: one for name, one in unmoved.items() if one.dtype == "float32" and one.lost > _MOST * one.nonzero}
    if found:
        shares = _shares(found.values())
        text = f"learning rate too small for parameters in float32: an update below half their spacing is lost{shares}"
        yield Finding("warning", "learning rate too small", text, tuple(found))


def _shares(found: Collection[Unmoved]) -> str:
    """The lost shares by role, and the learning rates, as text."""
    shares = ", ".join(
        f"{role} {percent(sum(one.lost for one in same) / count)}"
        for role, same in grouped((one.role, one) for one in found).items()
        if (count := sum(one.nonzero for one in same))
    )
    if not shares:
        return ""
    rates = [one.rate for one in found]
    ends = " to ".join(f"{rate:g}" for rate in sorted({min(rates), max(rates)}))
    return f", as one of lr = {ends} (Adam's size) is for these shares of the values: {shares}"


def _stalled_averages(setup: Setup, items: Iterable[Item]) -> Iterator[Finding]:
    """Averages a <- d a + (1 - d) x in a dtype in which d a rounds back to a."""
    # Values of [2^k, 2^(k+1)) have a spacing of 2^(k+1-p); below 2^k itself it is half of that.
    found = grouped(
        ((item.kind, item.dtype, decay), item.name)
        for item in items
        if item.dtype in _SIXTEEN
        and (decay := setup.decay(item.kind, item.name)) is not None
        and 0 < 1 - decay < 2.0 ** -(_SIXTEEN[item.dtype] + 1)
    )
    for (kind, dtype, decay), names in found.items():
        what = "averages of weights or activations" if kind in ("parameters", "buffers") else f"averages ({kind})"
        yield Finding(
            "warning",
            "average stands still",
            f"{what} in {dtype} that cannot decay: {decay:g} times a value rounds back to it, as 1 - {decay:g} = "
            f"{1 - decay:.1g} is below 2^-{_SIXTEEN[dtype] + 1}, half of the finest spacing; keep them in float32",
            tuple(names),
        )


_SIXTEEN = {"bfloat16": formats.get("bf16").significant_bits, "float16": formats.get("fp16").significant_bits}
"""Significant bits of the 16-bit types."""


def _vanished_squares(setup: Setup, items: Iterable[Item]) -> Iterator[Finding]:
    """Second moments that are zero where the first moments, or gradients, are not."""
    named = {(item.kind, item.name): item for item in items if item.dtype in (*_SIXTEEN, "float32")}
    gone: dict[str, dict[str, float]] = {}
    for (kind, name), item in named.items():
        beside = named.get(("exp_avg", name), named.get(("gradients", name)))
        if kind in ("exp_avg_sq", "square_avg") and beside is not None and setup.steps.get(name, 1) > 0:
            alive, expected = item.numel - item.zeros, beside.numel - beside.zeros
            if expected and alive < (1 - _MOST) * expected:
                gone.setdefault(item.dtype, {})[name] = 1 - alive / expected
    for dtype, shares in gone.items():
        ends = " to ".join(dict.fromkeys(map(percent, (min(shares.values()), max(shares.values())))))
        yield Finding(
            "warning",
            "second moments vanished",
            f"second moments in {dtype} that are zero where the gradients were not, {ends} of them: their "
            "squares underflowed, and the update is divided by eps alone",
            tuple(shares),
        )


def _zero_gradients(setup: Setup, items: Iterable[Item]) -> Iterator[Finding]:
    grads = [item for item in items if item.kind == "gradients" and item.effective is not None and item.numel]
    if not grads or any(item.zeros < item.numel for item in grads):
        return
    moments = [item for item in items if item.kind in ("exp_avg", "momentum_buffer") and item.effective is not None]
    remembers = any("betas" in group or group.get("momentum") for group in (setup.groups or {}).values())
    never = remembers and all(item.zeros == item.numel for item in moments)
    why = (
        ", and none was another before: they underflowed, or the loss does not depend on the parameters"
        if never
        else ": by zero_grad(set_to_none=False), or they underflowed in this step"
    )
    text = f"every gradient is zero, all {sum(item.numel for item in grads):,} values{why}"
    yield Finding("warning" if never else "note", "gradients are zero", text, tuple(item.name for item in grads))


def _scale(scale: float | None) -> Iterator[Finding]:
    if scale is not None and scale < SMALLEST_SCALE:
        yield Finding(
            "warning",
            "loss scale too small",
            f"the loss scale is {scale:.1e}, below {SMALLEST_SCALE:g}: step after step was skipped, for gradients that "
            "are finite at no scale. Look for the first infinity or NaN (halfstep.tracking), in float32 too",
            (),
        )


def _outside_autocast(setup: Setup, items: Iterable[Item]) -> Iterator[Finding]:
    """Matmul weights whose gradients use all of float32 while most gradients are 16-bit values, as from autocast."""
    grads = [item for item in items if item.kind == "gradients" and item.name in setup.products]
    cast = Counter(item.effective for item in grads if item.effective in ("bf16", "fp16", "bf16+fp16"))
    wide = [item.name for item in grads if item.dtype == "float32" and item.effective == "full"]
    if wide and cast.total() > len(wide):
        yield Finding(
            "note",
            "outside autocast",
            f"weights whose gradients use all of float32, where those of {cast.total()} others are exactly "
            f"{max(cast, key=cast.__getitem__)}: their products are computed outside autocast",
            tuple(wide),
        )
