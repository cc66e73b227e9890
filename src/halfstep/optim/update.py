"""One update in torch, for any rule, device and storage: the reference of `rule.fused`; and what watchers are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from halfstep import ops
from halfstep.ops.codes import read, write
from halfstep.optim.rules.base import Step, UpdateRule
from halfstep.optim.shards import like, local, spread_like
from halfstep.quant.masters import Own


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
        written: whether somebody may have written to the weight since the last step.
    """
    master, weight, kept, moments, kinds = step.master, step.weight, step.kept, step.moments, step.kinds
    if written:
        ops.follow(master, weight, kept)
    full, before = master.read(weight, kept), master.value(weight, kept) if watch else None
    if watch is None and rule.fused(
        Step(full, OWN, {}, step.grad, moments, step.number, step.group, step.grad_scale, kinds, step.coded)
    ):
        master.write(weight, kept, full)
        return
    values = {name: read(kind, name, moments, rule.shape(name, tuple(full.shape))) for name, kind in kinds.items()}
    if watch is None and rule.fused(Step(full, OWN, {}, step.grad, values, step.number, step.group, step.grad_scale)):
        for name, kind in kinds.items():
            write(kind, name, moments, values[name])
        master.write(weight, kept, full)
        return
    if not rule.elementwise:
        full = spread_like(full, parameter)
    grad = step.grad.float() if step.grad_scale == 1.0 else step.grad.float() * step.grad_scale
    updated, new = rule.update(full, grad, values, step.number, step.group)
    for name, moment in new.items():
        write(kinds[name], name, moments, moment)
    wanted = local(updated - full) if watch is not None else None
    master.write(weight, kept, local(like(parameter, updated)))
    if watch is not None and before is not None and wanted is not None:
        watch(Update(parameter, before, wanted, master.value(weight, kept) - before))
