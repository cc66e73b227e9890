"""The bytes that autograd keeps for the backward pass, by the module that saved them and by what they are kept in."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.ops.codes import Alone
from halfstep.text import grouped


_CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class SavedRow:
    """What the operations of one module keep in one form; a submodule's own are its own."""

    module: str
    """Its path; the root's, and that of code outside of the model, is empty."""
    form: str
    """`codes`, with the scales of what is not linear; or the dtype of tensors that are left alone: `float32` ..."""
    bytes: int


@dataclass(frozen=True)
class SavedBytes:
    """What autograd keeps at one moment: every memory once, whole, as its first saver's; no parameters, no buffers."""

    rows: tuple[SavedRow, ...]

    @property
    def codes(self) -> int:
        """Bytes of codes and their scales."""
        return sum(row.bytes for row in self.rows if row.form == "codes")

    @property
    def alone(self) -> int:
        """Bytes of tensors that are left as they are."""
        return self.total - self.codes

    @property
    def total(self) -> int:
        """All bytes, of codes and of what is kept as it is."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        title = f"kept for the backward pass: {self.total:,} bytes, {self.codes:,} in codes, {self.alone:,} left alone"
        rows = [f"  {row.bytes:>14,}  {row.form:<10} {row.module or '(the model itself)'}" for row in self.rows]
        return "\n".join([title, *rows])


class Saving:
    """What has been saved within `saving`, and by whom."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._found: dict[int, tuple[StorageWeakRef, str, str, int]] = {}
        self.inside: list[str] = []
        """The paths of the modules whose forward runs, the innermost last."""

    def now(self) -> SavedBytes:
        """What is still kept, by module in the order of their first tensor."""
        kept = (found for found in self._found.values() if not found[0].expired())  # type: ignore[no-untyped-call]
        rows = grouped(((module, form), size) for _, module, form, size in kept)
        return SavedBytes(tuple(SavedRow(*row, sum(sizes)) for row, sizes in rows.items()))

    def pack(self, x: Tensor) -> Any:
        """As a hook of autograd."""
        return self._note(x, "codes" if x.dtype in _CODES else str(x.dtype).removeprefix("torch."))

    def pack_part(self, x: Tensor) -> Any:
        """Of a tensor that is part of another's codes: the recipe's own hooks ask for this."""
        return self._note(x, "codes")

    def _note(self, x: Tensor, form: str) -> Alone:
        storage = x.untyped_storage()
        if storage._cdata not in self._own and storage.nbytes():
            known = self._found.get(storage._cdata)
            if known is None or known[0].expired():  # type: ignore[no-untyped-call]
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._found[storage._cdata] = reference, "".join(self.inside[-1:]), form, storage.nbytes()
        return Alone(x)


@contextmanager
def saving(model: nn.Module) -> Iterator[Saving]:
    """While active, what autograd saves is noted: `now()` says, before `backward()`, what is kept and in which form.

        with halfstep.tracking.saving(model) as saved:
            loss = model(x).mean()
        print(saved.now())

    Memory that the caller holds as well, such as the model's input, counts too. What torch's activation checkpointing
    drops does not, and neither do attributes that functions of other libraries keep beside autograd's.
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
        hooks.enter_context(saved_tensors_hooks(saved.pack, Alone.unpacked))
        yield saved
