"""`move`: one update in torch for any rule, device and storage, the reference of `rule.fused`; and `CodedWeight`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep import ops
from halfstep.ops import CodeTensor, codes
from halfstep.ops.code_tensor import as_bytes
from halfstep.optim.rules import Moments, Step, UpdateRule
from halfstep.optim.shards import like, local, spread_like
from halfstep.quant.masters import Kept, Master, Own
from halfstep.recipe import MASTER, Codes, Storage


OWN = Own("none", round_to=ops.round_to)
"""No master weights; updated weights are rounded by a kernel if there is one."""


@dataclass(frozen=True)
class Update:
    """An update as the rule computed it and as it was stored, in float32, for watchers (`LowBit.watched`)."""

    weight: Tensor
    before: Tensor
    """The stored value of the weight before the step, including its master."""
    wanted: Tensor
    """The rule's step."""
    effective: Tensor
    """The change of the stored value, including the master."""


def _kept_where_lost(kinds: Mapping[str, Storage], old: Moments, new: Moments) -> Moments:
    """The new moments, except for elements where a moment stored as codes would not be finite; these keep the old ones.

    A gradient of 1e25 has an infinite square in float32, and elements of a tile share a scale. The weights of such
    elements are updated, or become NaN, as torch's do.
    """
    coded = [~new[name].isfinite() for name, kind in kinds.items() if kind.dtype is None and name in new]
    if not coded:
        return new
    lost = torch.stack(coded).any(0)
    return {n: torch.where(lost, old[n], own) if own.shape == lost.shape else own for n, own in new.items()}


def move(
    rule: UpdateRule,
    step: Step,
    parameter: Tensor,
    written: bool,
    watch: Callable[[Update], None] | None,
) -> None:
    """Decode, update in float32 (by the rule's fused update if it applies), round and write.

    Args:
        parameter: the parameter; the step's weight is this rank's shard of it.
        written: whether the weight may have been written to since the last step.
        watch: a function to call with the update.
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
    values = {
        name: codes.read(kind, name, moments, rule.shape(name, tuple(full.shape))) for name, kind in kinds.items()
    }
    made = {name: value.clone() for name, value in values.items()} if step.coded else values
    if watch is None and rule.advance(Step(full, OWN, {}, step.grad, made, step.number, step.group, step.grad_scale)):
        for name, moment in _kept_where_lost(kinds, values, made).items():
            codes.write(kinds[name], name, moments, moment)
        master.write(weight, kept, full)
        return
    if not rule.elementwise:
        full = spread_like(full, parameter)
        values = {name: spread_like(value, parameter) for name, value in values.items()}
    grad = step.grad.float() if step.grad_scale == 1.0 else step.grad.float() * step.grad_scale
    updated, new = rule.update(full, grad, values, step.number, step.group)
    for name, moment in _kept_where_lost(kinds, values, new).items():
        codes.write(kinds[name], name, moments, local(moment))
    wanted = local(updated - full) if watch is not None else None
    master.write(weight, kept, local(like(parameter, updated)))
    if watch is not None and before is not None and wanted is not None:
        watch(Update(parameter, before, wanted, master.value(weight, kept) - before))


@dataclass(frozen=True)
class CodedWeight(Master):
    """The `Master` of CodeTensor weights: decoded, updated in float32 and encoded with new scales. With a master
    storage, the master in the optimizer's state is updated and the weight encodes its values.

    Source: MS-AMP, LBAdamW.
    """

    codes: Codes

    @property
    def keeps(self) -> dict[str, torch.dtype]:  # type: ignore[override]
        """As `Master.keeps`: the tensors of the master."""
        layout = self.codes.master.layout(MASTER, (1, 1)) if self.codes.master else {}
        return {name: dtype for name, (dtype, _) in layout.items()}

    @property
    def costly(self) -> bool:  # type: ignore[override]
        """As `Master.costly`."""
        return self.codes.master is not None

    def stored(self, weight: Tensor) -> Tensor:
        return weight.values() if isinstance(weight, CodeTensor) else super().stored(weight)

    def gradient(self, grad: Tensor) -> Tensor:
        if isinstance(grad, CodeTensor):
            return grad.values()
        return self._round_trip(grad.detach().float(), self.codes.grads) if self.codes.grads else grad

    def start(self, weight: Tensor, full: Tensor) -> Kept:
        kept = codes.store(self.codes.master, MASTER, full) if self.codes.master else {}
        self._write_weight(weight, kept, full)
        return kept

    def read(self, weight: Tensor, kept: Kept) -> Tensor:
        if self.codes.master is None:
            return self.stored(weight)
        full = codes.read(self.codes.master, MASTER, kept, tuple(weight.shape))
        return full.clone() if full is kept[MASTER] else full

    def write(self, weight: Tensor, kept: Kept, updated: Tensor) -> None:
        if self.codes.master is not None:
            codes.write(self.codes.master, MASTER, kept, updated)
        self._write_weight(weight, kept, updated)

    def _write_weight(self, weight: Tensor, kept: Kept, full: Tensor) -> None:
        assert isinstance(weight, CodeTensor)
        weight.write(self.read(weight, kept) if self.codes.master else full)

    def follow(self, weight: Tensor, kept: Kept) -> None:
        if self.codes.master is None:
            return
        full, now = self.read(weight, kept), self.stored(weight)
        changed = self._round_trip(full, self.codes.weights) != now
        fresh = codes.store(self.codes.master, MASTER, torch.where(changed, now, full))
        for name, own in kept.items():  # unconditionally: on a GPU the host would wait for a condition
            as_bytes(own).copy_(torch.where(changed.any(), as_bytes(fresh[name]), as_bytes(own)))

    def _round_trip(self, values: Tensor, storage: Storage) -> Tensor:
        """float32 values encoded by the storage and decoded again."""
        quantizer = storage.quantizer
        return codes.decode_parts(codes.encode_parts(values, quantizer), quantizer, tuple(values.shape), torch.float32)
