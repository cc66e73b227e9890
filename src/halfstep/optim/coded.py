"""Weights whose memory is codes: what the optimizer reads and writes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.ops import CodeTensor, codes
from halfstep.ops.dispatch import as_bytes
from halfstep.quant.masters import Kept, Master
from halfstep.recipe import MASTER, Codes, Storage


@dataclass(frozen=True)
class CodedWeight(Master):
    """Codes that take the update: decoded, moved in float32, and encoded with new scales. Where there is a master, it
    takes the update, in the optimizer's state, and the weight is its image.

    Source: MS-AMP, LBAdamW.
    """

    codes: Codes

    @property
    def keeps(self) -> dict[str, torch.dtype]:  # type: ignore[override]
        """As `Master.keeps`: what the master is made of."""
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
        return self._image(grad.detach().float(), self.codes.grads) if self.codes.grads else grad

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
        changed = self._image(full, self.codes.weights) != now
        fresh = codes.store(self.codes.master, MASTER, torch.where(changed, now, full))
        for name, own in kept.items():  # on a GPU the host would wait to hear whether there is anything to do
            where = torch.where(changed.any(), as_bytes(fresh[name]), as_bytes(own))
            as_bytes(own).copy_(where)

    def _image(self, values: Tensor, storage: Storage) -> Tensor:
        """What is left of float32 values that are stored so."""
        quantizer = storage.quantizer
        return codes.decode_parts(codes.encode_parts(values, quantizer), quantizer, tuple(values.shape), torch.float32)
