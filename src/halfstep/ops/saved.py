"""What autograd keeps for the backward pass, in few bits: one copy of what several operations save.

torch calls the hooks of the innermost `torch.autograd.graph.saved_tensors_hooks` alone, so these are entered around
single modules, and give what they make of a tensor to the hooks that were there before: offload and activation
checkpointing around a model see codes, and a part that is computed again in the backward pass keeps the same numbers.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils.weak import TensorWeakRef

from halfstep.kernels import scaled_mm, unit_kinds
from halfstep.kernels.operators import decode_into
from halfstep.ops.carriers import carrier
from halfstep.ops.casts import encode
from halfstep.ops.codes import decode_parts, encode_parts
from halfstep.ops.operand import Operand, operand
from halfstep.ops.subclasses import foreign
from halfstep.quant import Quantizer
from halfstep.quant.rounding import Seed
from halfstep.recipe import Saved, Storage


_ROOM = 256  # entries before those that are no longer alive are looked for
_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Hook = Callable[[Any], Any]


class Keeping:
    """What one model's calls keep for their backward passes, by where it lies, as long as both are alive.

    A copy begins with nothing.
    """

    def __init__(self, saved: Saved) -> None:
        self.saved = saved
        self._kept: dict[Hashable, _Entry] = {}
        self._room = _ROOM

    def __getstate__(self) -> dict[str, Any]:
        return {"saved": self.saved, "_kept": {}, "_room": _ROOM}

    def operand(
        self,
        x: Tensor,
        rows: Tensor,
        quantizer: Quantizer,
        dtype: torch.dtype,
        state: Tensor | None,
        record: bool,
        seed: Seed | None,
        units: bool,
    ) -> tuple[Operand, Tensor]:
        """`ops.operand` of `rows`, which are x as a matrix, and the codes of its values, exactly.

        Products that round the same x alike, each by itself alone, share both.
        """
        place = place_of(x) if state is None and quantizer.rounding == "nearest_even" else None
        key = None if place is None else (place, quantizer, dtype)
        found = self.find(key)
        if found is not None:
            return Operand(of_codes(found["codes"], quantizer, dtype, units), found["scale"]), found["codes"]
        made = operand(rows, quantizer, dtype, state, record, units=units, seed=seed, coded=True)
        codes = made.codes
        if codes is None:
            in_codes = made.values.dtype in unit_kinds.DTYPES
            codes = made.values.view(torch.uint8) if in_codes else encode(made.values, quantizer.format)
        if key is not None and made.scale is not None:
            self.note(key, _Entry(x, {"codes": codes, "scale": made.scale}))
        return made, codes

    def around(self, x: Tensor) -> AbstractContextManager[Any]:
        """Within it, what autograd saves of the shape of x is kept as the recipe's `nonlinear` says."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        within = top is not None and isinstance(getattr(top[0], "__self__", None), _Hooks)
        if within or not torch.is_grad_enabled() or not _hooks_enabled():
            return nullcontext()
        assert self.saved.nonlinear is not None
        hooks = _Hooks(self, self.saved.nonlinear, x.shape, top)
        return saved_tensors_hooks(hooks.pack, hooks.unpack)

    def find(self, key: Hashable) -> dict[str, Tensor] | None:
        """What is kept under a key; None where there is nothing, or it is gone."""
        entry = self._kept.get(key)
        return None if entry is None else entry.found()

    def note(self, key: Hashable, entry: "_Entry") -> None:
        """Keep something under a key, and let go of what is gone when there is much of it."""
        if len(self._kept) >= self._room:
            self._kept = {key: entry for key, entry in self._kept.items() if entry.found() is not None}
            self._room = max(_ROOM, 2 * len(self._kept))
        self._kept[key] = entry


class _Entry:
    """The codes of a saved tensor, valid while they and the tensor's memory exist: memory that is freed and allocated
    again holds other numbers. (A weak reference to a storage also keeps its address from becoming another's.)"""

    __slots__ = ("kept", "source")

    def __init__(self, source: Tensor, kept: dict[str, Tensor]) -> None:
        self.source = StorageWeakRef(source.untyped_storage())  # type: ignore[no-untyped-call]
        self.kept = dict(zip(kept, map(TensorWeakRef, kept.values()), strict=True))

    def found(self) -> dict[str, Tensor] | None:
        if self.source.expired():  # type: ignore[no-untyped-call]
            return None
        kept = {name: part for name, reference in self.kept.items() if (part := reference()) is not None}
        return kept if len(kept) == len(self.kept) else None


class _Kept:
    """A tensor in codes, or in another dtype: what the hooks around made of its parts."""

    __slots__ = ("dtype", "parts", "shape")

    def __init__(self, parts: dict[str, Any], shape: torch.Size, dtype: torch.dtype) -> None:
        self.parts, self.shape, self.dtype = parts, shape, dtype


class Alone:
    """A tensor as it is, and the version that autograd saved."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()  # its graph would keep itself alive
        self.version = tensor._version

    def unpacked(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written to; torch's own check ends where hooks begin.
        """
        found = self.tensor._version
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {found}; expected version "
                f"{self.version} instead. Write to a copy (x = x + 1 in place of x += 1), or write after backward()"
            )
        return self.tensor


class _Hooks:
    def __init__(self, keeping: Keeping, storage: Storage, shape: torch.Size, outer: tuple[Hook, Hook] | None) -> None:
        self._keeping, self._storage, self._shape = keeping, storage, shape
        self._outer = outer
        around = None if outer is None else getattr(outer[0], "__self__", None)
        self._part: Hook | None = getattr(around, "pack_part", None if outer is None else outer[0])

    def pack(self, x: Tensor) -> Any:
        if not self._takes(x):
            return Alone(x) if self._outer is None else self._outer[0](x)
        keeping, place = self._keeping, place_of(x)
        key = None if place is None else (place, self._storage)
        parts = keeping.find(key)
        if parts is None:
            parts = self._made(x.detach())
            if key is not None:
                keeping.note(key, _Entry(x, parts))
        packed = parts if self._part is None else {name: self._part(part) for name, part in parts.items()}
        return _Kept(packed, x.shape, x.dtype)

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Alone):
            return kept.unpacked()
        outer = None if self._outer is None else self._outer[1]
        if not isinstance(kept, _Kept):
            assert outer is not None
            return outer(kept)  # type: ignore[no-any-return]
        parts = kept.parts if outer is None else {name: outer(part) for name, part in kept.parts.items()}
        if self._storage.dtype is not None:
            return parts["values"].to(kept.dtype)  # type: ignore[no-any-return]
        matrix = self._storage.matrix(tuple(kept.shape))
        return decode_parts(parts, self._storage.quantizer, matrix, kept.dtype).view(kept.shape)

    def _made(self, x: Tensor) -> dict[str, Tensor]:
        if self._storage.dtype is not None:
            return {"values": x.to(self._storage.dtype)}
        return encode_parts(x.reshape(self._storage.matrix(tuple(x.shape))), self._storage.quantizer)

    def _takes(self, x: Tensor) -> bool:
        """Whether it is a plain floating tensor that some operation made, of the module's shape, and in another dtype
        than it would be kept in. In a backward pass leaves are such: reentrant checkpointing detaches what it begins
        with."""
        leaf = x.is_leaf and x.requires_grad and torch._C._current_graph_task_id() == -1
        made = foreign(x) is None and not isinstance(x, Parameter) and not leaf and x.layout == torch.strided
        fits = made and x.shape == self._shape and x.dtype in _FLOATS and x.dtype != self._storage.dtype
        return fits and x.numel() > 0 and 0 not in x.stride()


def of_codes(codes: Tensor, quantizer: Quantizer, dtype: torch.dtype, units: bool) -> Tensor:
    """The values of an operand with one scale, from its codes: as tensor cores take them, where there may be any."""
    native, format = scaled_mm.outer_dtype(quantizer, codes.device) if units else None, quantizer.format
    if native is not None:
        return codes.view(native)
    values = torch.empty(codes.shape, dtype=carrier(format.key, dtype), device=codes.device)
    decode_into(codes.contiguous(), values, format)
    return values


def place_of(x: Tensor) -> Hashable | None:
    """Where a tensor lies, how, and how often it was written to: of one that a differentiated operation made. None of
    others, and views of others: memory that came from outside (a loader's, numpy's, what a rank receives into) is
    written to with no version that would tell."""
    made = x if x._base is None else x._base
    if made.grad_fn is None:
        return None
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
