"""What an audit has to say of updates that cannot arrive: lost ones, averages that stand still, zero gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfstep import formats
from halfstep.auditing.report import Finding, Item
from halfstep.auditing.setup import Setup, kept_as, name_of
from halfstep.bits.origin import stored_format
from halfstep.bits.sentences import percent
from halfstep.bits.table import Table
from halfstep.formats import Float
from halfstep.grouping import grouped


SMALLEST_SCALE = 1e-6
"""Loss scales below it have been halved 36 times from 65536: no step of a working setup overflows so."""

_SQUARES = ("exp_avg_sq", "square_avg")
_MOST = 0.5  # of a tensor's values, from which on it is the tensor that does not move


@dataclass(frozen=True)
class Unmoved:
    """Of the values of one parameter: those that an update as large as the learning rate leaves as they are."""

    dtype: str
    rate: float
    role: str
    lost: int
    nonzero: int


def unmoved_by(setup: Setup, name: str, dtype: str, table: Table) -> Unmoved | None:
    """What Adam's steps, which are about as large as the learning rate, leave as it is; None of other optimizers."""
    stored, group = stored_format(dtype), (setup.groups or {})[name]
    rate = float(group.get("lr", 0.0))
    if "betas" not in group or not rate or stored is None:
        return None
    if dtype == "float32":  # a schedule that begins or ends near zero is no fault
        rate = max(rate, *(float(group.get(peak, 0.0)) for peak in ("initial_lr", "max_lr")))
    return Unmoved(dtype, rate, setup.roles[name], table.unmoved(stored, rate), table.nonzero)


def find_updates(
    setup: Setup, items: Sequence[Item], unmoved: Mapping[str, Unmoved], loss_scale: float | None
) -> Iterator[Finding]:
    """The findings of this file."""
    yield from _no_master(setup, unmoved)
    yield from _too_small(unmoved)
    yield from _still(setup, items)
    yield from _squares(setup, items)
    yield from _zero_gradients(setup, items)
    yield from _scale(loss_scale)
    yield from _outside(setup, items)


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


def _shares(found: Iterable[Unmoved]) -> str:
    """The shares that are lost, by role, and the learning rates."""
    gone, all_values, rates = Counter[str](), Counter[str](), set[float]()
    for one in found:
        gone[one.role] += one.lost
        all_values[one.role] += one.nonzero
        rates.add(one.rate)
    if not all_values.total():
        return ""
    shares = ", ".join(f"{role} {percent(gone[role] / count)}" for role, count in all_values.items() if count)
    ends = " to ".join(f"{rate:g}" for rate in sorted({min(rates), max(rates)}))
    return f", as one of lr = {ends} (Adam's size) is for these shares of the values: {shares}"


def _still(setup: Setup, items: Iterable[Item]) -> Iterator[Finding]:
    """Averages a <- d a + (1 - d) x in a type in which d a rounds back to a."""
    found: dict[tuple[str, str, float], list[str]] = {}
    for item in items:
        decay, format = setup.decay(item.kind, item.name), _SIXTEEN.get(item.dtype)
        # Values of [2^k, 2^(k+1)) have a spacing of 2^(k+1-p); below 2^k itself it is half of that.
        if decay is not None and format is not None and 0 < 1 - decay < 2.0 ** -(format.significant_bits + 1):
            found.setdefault((item.kind, item.dtype, decay), []).append(item.name)
    for (kind, dtype, decay), names in found.items():
        format = _SIXTEEN[dtype]
        what = "averages of weights or activations" if kind in ("parameters", "buffers") else f"averages ({kind})"
        text = (
            f"{what} in {dtype} that cannot decay: {decay:g} times a value rounds back to it, as 1 - {decay:g} = "
            f"{1 - decay:.1g} is below 2^-{format.significant_bits + 1}, half of the finest spacing; keep them in "
            "float32"
        )
        yield Finding("warning", "average stands still", text, tuple(names))


_SIXTEEN = {"bfloat16": formats.get("bf16", Float), "float16": formats.get("fp16", Float)}


def _squares(setup: Setup, items: Iterable[Item]) -> Iterator[Finding]:
    """Second moments that are zero where the first ones, or gradients, are not."""
    named = {(item.kind, item.name): item for item in items if item.dtype in (*_SIXTEEN, "float32")}
    gone: dict[str, dict[str, float]] = {}
    for (kind, name), item in named.items():
        beside = named.get(("exp_avg", name), named.get(("gradients", name)))
        if kind in _SQUARES and beside is not None and setup.steps.get(name, 1) > 0:
            alive, expected = item.numel - item.zeros, beside.numel - beside.zeros
            if expected and alive < (1 - _MOST) * expected:
                gone.setdefault(item.dtype, {})[name] = 1 - alive / expected
    for dtype, shares in gone.items():
        ends = " to ".join(dict.fromkeys(map(percent, (min(shares.values()), max(shares.values())))))
        text = (
            f"second moments in {dtype} that are zero where the gradients were not, {ends} of them: their "
            "squares underflowed, and the update is divided by eps alone"
        )
        yield Finding("warning", "second moments vanished", text, tuple(shares))


def _zero_gradients(setup: Setup, items: Iterable[Item]) -> Iterator[Finding]:
    grads = [item for item in items if item.kind == "gradients" and item.effective is not None and item.numel]
    if not grads or any(item.zeros < item.numel for item in grads):
        return
    moments = [item for item in items if item.kind in ("exp_avg", "momentum_buffer") and item.effective is not None]
    remembers = any("betas" in group or group.get("momentum") for group in (setup.groups or {}).values())
    text, names = (
        f"every gradient is zero, all {sum(item.numel for item in grads):,} values",
        tuple(i.name for i in grads),
    )
    if remembers and all(item.zeros == item.numel for item in moments):
        why = "they underflowed, or the loss does not depend on the parameters"
        yield Finding("warning", "gradients are zero", f"{text}, and none was another before: {why}", names)
    else:
        why = "by zero_grad(set_to_none=False), or they underflowed in this step"
        yield Finding("note", "gradients are zero", f"{text}: {why}", names)


def _scale(scale: float | None) -> Iterator[Finding]:
    if scale is not None and scale < SMALLEST_SCALE:
        text = (
            f"the loss scale is {scale:.1e}, below {SMALLEST_SCALE:g}: step after step was skipped, for gradients that "
            "are finite at no scale. Look for the first infinity or NaN (halfstep.tracking), in float32 too"
        )
        yield Finding("warning", "loss scale too small", text, ())


def _outside(setup: Setup, items: Iterable[Item]) -> Iterator[Finding]:
    """Weights of products whose gradients use all of float32 where those of most are 16-bit values: autocast's."""
    grads = [item for item in items if item.kind == "gradients" and item.name in setup.products]
    cast = Counter(item.effective for item in grads if item.effective in ("bf16", "fp16", "bf16+fp16"))
    wide = [item.name for item in grads if item.dtype == "float32" and item.effective == "full"]
    if wide and cast.total() > len(wide):
        text = (
            f"weights whose gradients use all of float32, where those of {cast.total()} others are exactly "
            f"{max(cast, key=cast.__getitem__)}: their products are computed outside autocast"
        )
        yield Finding("note", "outside autocast", text, tuple(wide))
