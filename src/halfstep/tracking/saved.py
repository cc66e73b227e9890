"""The bytes that autograd saves for the backward pass, by the module that saved them and by their form."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.ops.codes import SavedTensor
from halfstep.text import grouped


_CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class SavedRow:
    """The tensors that the operations of one module save in one form, without those of its submodules."""

    module: str
    """Its path; empty for the root, and for code outside of the model."""
    form: str
    """`codes`, which includes scales that are saved with codes; or the dtype of tensors saved unquantized: `float32`
    ..."""
    bytes: int


@dataclass(frozen=True)
class SavedBytes:
    """The tensors that autograd saves at one moment: every storage once, under its first saver; no parameters, no
    buffers."""

    rows: tuple[SavedRow, ...]

    @property
    def codes(self) -> int:
        """Bytes of codes and their scales."""
        return sum(row.bytes for row in self.rows if row.form == "codes")

    @property
    def alone(self) -> int:
        """Bytes of tensors saved unquantized."""
        return self.total - self.codes

    @property
    def total(self) -> int:
        """Bytes of codes and of unquantized tensors."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        title = f"saved for backward: {self.total:,} bytes, {self.codes:,} in codes, {self.alone:,} unquantized"
        rows = [f"  {row.bytes:>14,}  {row.form:<10} {row.module or '(the model itself)'}" for row in self.rows]
        return "\n".join([title, *rows])


class Saving:
    """The tensors saved within `saving`, by module."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._found: dict[int, tuple[StorageWeakRef, str, str, int]] = {}
        self.inside: list[str] = []
        """The paths of the modules whose forward is running, the innermost last."""

    def now(self) -> SavedBytes:
        """The tensors that are still saved, by module in the order of their first tensor."""
        kept = (found for found in self._found.values() if not found[0].expired())  # type: ignore[no-untyped-call]
        rows = grouped(((module, form), size) for _, module, form, size in kept)
        return SavedBytes(tuple(SavedRow(*row, sum(sizes)) for row, sizes in rows.items()))

    def pack(self, x: Tensor) -> Any:
        """The pack hook of autograd's saved tensors."""
        return self._note(x, "codes" if x.dtype in _CODES else str(x.dtype).removeprefix("torch."))

    def pack_part(self, x: Tensor) -> Any:
        """The same for a part of a tensor's codes, such as its scales; the recipe's own hooks call it."""
        return self._note(x, "codes")

    def _note(self, x: Tensor, form: str) -> SavedTensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._own and storage.nbytes():
            known = self._found.get(storage._cdata)
            if known is None or known[0].expired():  # type: ignore[no-untyped-call]
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._found[storage._cdata] = reference, "".join(self.inside[-1:]), form, storage.nbytes()
        return SavedTensor(x)


@contextmanager
def saving(model: nn.Module) -> Iterator[Saving]:
    """A context that records the tensors saved by autograd; `now()`, before `backward()`, gives their bytes by form.

        with halfstep.tracking.saving(model) as saved:
            loss = model(x).mean()
        print(saved.now())

    Storages that the caller also holds, such as the model's input, count too. Tensors that torch's activation
    checkpointing drops do not count, and neither do attributes that other libraries' functions store outside of
    autograd.
    """
    saved = Saving(model)

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        saved.inside.pop()

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                enter = module.register_forward_pre_hook(lambda _, __, path=path: saved.inside.append(path))
                hooks.enter_context(enter)
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        hooks.enter_context(saved_tensors_hooks(saved.pack, SavedTensor.unpacked))
        yield saved
