"""Tensors as codes and scales, and what autograd saves for the backward pass in few bits.

Codes are under one power of two, as a quantizer lays them out, or as a storage names them. Of what several operations
save one copy is kept.

torch calls the hooks of the innermost `torch.autograd.graph.saved_tensors_hooks` alone, so these are entered around
single modules, and give what they make of a tensor to the hooks that were there before: offload and activation
checkpointing around a model see codes, and a part that is computed again in the backward pass keeps the same numbers.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef

from halfstep import formats
from halfstep.kernels import operators, scaled_mm, units_mm
from halfstep.kernels.cpu.arrays import plain
from halfstep.kernels.operator import amax_of, times
from halfstep.kernels.operators import decode_into
from halfstep.ops.casts import Quantized, carrier, encode, quantize_parts
from halfstep.ops.operand import Operand, operand
from halfstep.ops.subclasses import foreign
from halfstep.quant import Quantizer, get_scaling
from halfstep.quant.quantizer import matrix_shape
from halfstep.quant.rounding import Seed
from halfstep.quant.tracing import has_memory
from halfstep.recipe import Saved, Storage
from halfstep.recipe.storage import scaled_dtype


_FEW = 8  # numbers, whose codes fill whole bytes


# ---- codes and scales ------------------------------------------------------------------------------------------------


def encode_scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes in `dtype`, each rounded to nearest-even once, and their scale: x ~ codes * scale.

    scale, a float32 scalar, is the smallest power of two with amax / scale <= max, so amax / scale lies in
    (max / 2, max]. An infinity or NaN makes everything NaN.

    Source: MS-AMP, ScalingMeta.compute_scaling_factor, whose factor is 1 / scale.
    """
    factor = get_scaling("rceil").factor(amax_of(x), formats.get(dtype))
    assert factor is not None
    return (x.float() * factor).to(dtype), factor.reciprocal()


def decode_scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale, in float32, exactly."""
    if codes.itemsize == 1 and has_memory(codes) and plain(codes, codes.dtype):
        values = torch.empty(
            codes.shape, dtype=torch.float32, device="cpu"
        )  # torch's own conversion goes number by number
        operators.decode_into(codes.view(torch.uint8), values, formats.get(codes.dtype))
        return times(values, scale)
    return times(codes.to(torch.float32, copy=True), scale)


def encode_parts(x: Tensor, quantizer: Quantizer) -> dict[str, Tensor]:
    """Codes and scales of x, by name: in torch's dtype under one scale where there is one (`scaled_dtype`), else as
    `quantize` lays them out."""
    dtype = scaled_dtype(quantizer)
    if dtype is None:
        return quantize_parts(x.detach().contiguous(), quantizer)
    codes, scale = encode_scaled(x, dtype)
    return {"codes": codes, "scale": scale}


def decode_parts(
    parts: Mapping[str, Tensor], quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The values, of that shape and dtype, of what `encode_parts` made."""
    if scaled_dtype(quantizer) is not None:
        return decode_scaled(parts["codes"], parts["scale"]).to(dtype)
    return Quantized(quantizer, shape, dtype, dict(parts)).dequantize()


# ---- tensors by name, as a storage keeps them ------------------------------------------------------------------------


def store(storage: Storage, name: str, values: Tensor) -> dict[str, Tensor]:
    """The tensors that float32 values are kept in, by name."""
    if storage.dtype is not None:
        parts = {number: torch.empty_like(values, dtype=storage.dtype) for number in storage.numbers(name)}
    else:
        layout = storage.layout(name, tuple(values.shape)).items()
        parts = {part: torch.empty(shape, dtype=dtype, device=values.device) for part, (dtype, shape) in layout}
    write(storage, name, parts, values)
    return parts


def store_zeros(storage: Storage, name: str, shape: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """As `store`, of zeros of that shape, which have one code and one scale: those of a few of them."""
    known = _zeros_of(storage, name, shape)
    if known is None:
        return store(storage, name, torch.zeros(shape, dtype=torch.float32, device=device))
    return {part: torch.full(size, zero, dtype=dtype, device=device) for part, dtype, size, zero in known}


@lru_cache(maxsize=4096)
def _zeros_of(
    storage: Storage, name: str, shape: tuple[int, ...]
) -> Sequence[tuple[str, torch.dtype, Any, Any]] | None:
    """Name, dtype, shape and the one number of each tensor that zeros are kept in; None where they are rounded as any
    numbers are: few ones, and rows whose last byte has bits left over."""
    rows, columns = matrix_shape(storage.matrix(shape))
    if rows * columns <= _FEW or columns * storage.quantizer.format.bits % 8:
        return None
    parts = storage.layout(name, shape).items()
    return [(part, *kind, zero) for (part, kind), zero in zip(parts, _zero(storage), strict=True)]


@cache
def _zero(storage: Storage) -> Sequence[Any]:
    """What is in each of the tensors that zeros are kept in."""
    with _disable_current_modes(), torch.no_grad():  # a FakeTensor has no numbers
        few = store(storage, "", torch.zeros(_FEW, dtype=torch.float32, device="cpu"))
        return [part.view(-1)[0].item() for part in few.values()]


def read(storage: Storage, name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The float32 values of a tensor of that shape: in its own memory where it is stored so."""
    first, *others = (_number(storage, number, tensors, shape) for number in storage.numbers(name))
    return first + others[0] if others else first


def write(storage: Storage, name: str, tensors: Mapping[str, Tensor], values: Tensor) -> None:
    """Round float32 values into the tensors that one is kept in."""
    for number in storage.numbers(name):
        if number != name:
            values = values - _number(storage, name, tensors, tuple(values.shape))  # what the first left over
        if storage.dtype is not None:
            tensors[number].copy_(values)
        else:
            parts = encode_parts(values.reshape(storage.matrix(tuple(values.shape))), storage.quantizer)
            for part, own in storage.names(number).items():
                tensors[own].copy_(parts[part])


def _number(storage: Storage, number: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    if storage.dtype is not None:
        return tensors[number].float()
    parts = {part: tensors[own] for part, own in storage.names(number).items()}
    return decode_parts(parts, storage.quantizer, storage.matrix(shape), torch.float32).view(shape)


# ---- tensors saved for the backward pass -----------------------------------------------------------------------------

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
            in_codes = made.values.dtype in units_mm.DTYPES
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
        self._checkpoints = outer is not None and getattr(outer[0], "__module__", "") == checkpoint.__name__
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
        with. The other way does not, and has hooks of its own."""
        leaf = x.is_leaf and x.requires_grad and (torch._C._current_graph_task_id() == -1 or self._checkpoints)
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
    if (x if x._base is None else x._base).grad_fn is None:
        return None
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
