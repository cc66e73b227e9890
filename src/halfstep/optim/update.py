"""One update in torch, for any rule, device and storage: the reference of `rule.fused`; and what watchers are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep import ops
from halfstep.ops.codes import read, write
from halfstep.optim.rules.base import Moments, Step, UpdateRule
from halfstep.optim.shards import like, local, spread_like
from halfstep.quant.masters import Own
from halfstep.recipe import Storage


OWN = Own("none", round_to=ops.round_to)
"""No master, rounding by a kernel where there is one."""


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


def _kept_where_lost(kinds: Mapping[str, Storage], old: Moments, new: Moments) -> Moments:
    """New moments; the old ones of elements of which a moment that is codes would not be finite: a gradient of 1e25 has
    no square, and the scale of codes is others' too. Their weights move, or become NaN, as torch's do."""
    lost = None
    for name, kind in kinds.items():
        if kind.dtype is None and name in new:
            own = ~new[name].isfinite()
            lost = own if lost is None else lost | own
    if lost is None:
        return new
    return {n: torch.where(lost, old[n], own) if own.shape == lost.shape else own for n, own in new.items()}


def move(
    rule: UpdateRule,
    step: Step,
    parameter: Tensor,
    written: bool,
    watch: Callable[[Update], None] | None,
) -> None:
    """Decode, update, round and write; the rule's fused update serves in between where it can in float32.

    Args:
        parameter: of which the step's weight is this rank's part.
        written: whether the weight may have been written to since the last step.
    """
    master, weight, kept, moments, kinds = step.master, step.weight, step.kept, step.moments, step.kinds
    if written:
        ops.follow(master, weight, kept)
    full, before = master.read(weight, kept), master.value(weight, kept) if watch else None
    if watch is None and rule.advance(
        Step(full, OWN, {}, step.grad, moments, step.number, step.group, step.grad_scale, kinds, step.coded)
    ):
        master.write(weight, kept, full)
        return
    values = {name: read(kind, name, moments, rule.shape(name, tuple(full.shape))) for name, kind in kinds.items()}
    made = {name: value.clone() for name, value in values.items()} if step.coded else values
    if watch is None and rule.advance(Step(full, OWN, {}, step.grad, made, step.number, step.group, step.grad_scale)):
        for name, moment in _kept_where_lost(kinds, values, made).items():
            write(kinds[name], name, moments, moment)
        master.write(weight, kept, full)
        return
    if not rule.elementwise:
        full = spread_like(full, parameter)
        values = {name: spread_like(value, parameter) for name, value in values.items()}
    grad = step.grad.float() if step.grad_scale == 1.0 else step.grad.float() * step.grad_scale
    updated, new = rule.update(full, grad, values, step.number, step.group)
    for name, moment in _kept_where_lost(kinds, values, new).items():
        write(kinds[name], name, moments, local(moment))
    wanted = local(updated - full) if watch is not None else None
    master.write(weight, kept, local(like(parameter, updated)))
    if watch is not None and before is not None and wanted is not None:
        watch(Update(parameter, before, wanted, master.value(weight, kept) - before))
