"""Encoding and decoding of tensors as codes and scales, and hooks that save tensors for backward in few bits.

A tensor is encoded with one power-of-two scale, by a quantizer, or in the tensors that a `Storage` names. If several
operations save the same tensor for backward, one copy of its codes is stored.

torch calls only the innermost `torch.autograd.graph.saved_tensors_hooks`. So these hooks are entered around single
modules and pass the codes on to the hooks that were active before: offloading and activation checkpointing around a
model get codes, and a checkpointed part that is computed again saves the same codes.
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


_FEW = 8  # as many codes of any size fill whole bytes


# ---- codes and scales ------------------------------------------------------------------------------------------------


def encode_scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes in `dtype`, each rounded once to nearest even, and their scale: x ~ codes * scale.

    scale, a float32 scalar, is the smallest power of two with amax / scale <= max, so amax / scale lies in
    (max / 2, max]. If x has an infinity or NaN, all codes are NaN.

    Source: MS-AMP, ScalingMeta.compute_scaling_factor, whose factor is 1 / scale.
    """
    factor = get_scaling("rceil").factor(amax_of(x), formats.get(dtype))
    assert factor is not None
    return (x.float() * factor).to(dtype), factor.reciprocal()


def decode_scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale in float32, which is exact."""
    if codes.itemsize == 1 and has_memory(codes) and plain(codes, codes.dtype):
        values = torch.empty(codes.shape, dtype=torch.float32, device="cpu")  # torch converts element by element
        operators.decode_into(codes.view(torch.uint8), values, formats.get(codes.dtype))
        return times(values, scale)
    return times(codes.to(torch.float32, copy=True), scale)


def encode_parts(x: Tensor, quantizer: Quantizer) -> dict[str, Tensor]:
    """Codes and scales of x, by name: as `encode_scaled` if torch has a dtype for them (`scaled_dtype`), else as
    `quantize` lays them out."""
    dtype = scaled_dtype(quantizer)
    if dtype is None:
        return quantize_parts(x.detach().contiguous(), quantizer)
    codes, scale = encode_scaled(x, dtype)
    return {"codes": codes, "scale": scale}


def decode_parts(
    parts: Mapping[str, Tensor], quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The values of the tensors that `encode_parts` returned, in `shape` and `dtype`."""
    if scaled_dtype(quantizer) is not None:
        return decode_scaled(parts["codes"], parts["scale"]).to(dtype)
    return Quantized(quantizer, shape, dtype, dict(parts)).dequantize()


# ---- tensors of a Storage, by name -----------------------------------------------------------------------------------


def store(storage: Storage, name: str, values: Tensor) -> dict[str, Tensor]:
    """The tensors in which the storage holds float32 values under `name`, by their own names."""
    if storage.dtype is not None:
        parts = {number: torch.empty_like(values, dtype=storage.dtype) for number in storage.numbers(name)}
    else:
        layout = storage.layout(name, tuple(values.shape)).items()
        parts = {part: torch.empty(shape, dtype=dtype, device=values.device) for part, (dtype, shape) in layout}
    write(storage, name, parts, values)
    return parts


def store_zeros(storage: Storage, name: str, shape: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """`store` of zeros of that shape. All their codes and scales are equal, so a few zeros are encoded."""
    known = _zeros_of(storage, name, shape)
    if known is None:
        return store(storage, name, torch.zeros(shape, dtype=torch.float32, device=device))
    return {part: torch.full(size, zero, dtype=dtype, device=device) for part, dtype, size, zero in known}


@lru_cache(maxsize=4096)
def _zeros_of(
    storage: Storage, name: str, shape: tuple[int, ...]
) -> Sequence[tuple[str, torch.dtype, Any, Any]] | None:
    """Name, dtype, shape and fill value of each tensor that stores zeros; None where zeros are encoded as any values
    are: few elements, and rows whose codes do not fill their last byte."""
    rows, columns = matrix_shape(storage.matrix(shape))
    if rows * columns <= _FEW or columns * storage.quantizer.format.bits % 8:
        return None
    parts = storage.layout(name, shape).items()
    return [(part, *kind, zero) for (part, kind), zero in zip(parts, _zero(storage), strict=True)]


@cache
def _zero(storage: Storage) -> Sequence[Any]:
    """The fill value of each of the tensors that store zeros."""
    with _disable_current_modes(), torch.no_grad():  # a FakeTensor has no values
        few = store(storage, "", torch.zeros(_FEW, dtype=torch.float32, device="cpu"))
        return [part.view(-1)[0].item() for part in few.values()]


def read(storage: Storage, name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The float32 values of the tensor stored under `name`; the stored tensor itself if the storage is fp32."""
    first, *others = (_number(storage, number, tensors, shape) for number in storage.numbers(name))
    return first + others[0] if others else first


def write(storage: Storage, name: str, tensors: Mapping[str, Tensor], values: Tensor) -> None:
    """Round float32 values into the tensors stored under `name`."""
    for number in storage.numbers(name):
        if number != name:
            values = values - _number(storage, name, tensors, tuple(values.shape))  # the first one's rounding error
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

_ROOM = 256  # entries before those whose tensors are gone are dropped
_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Hook = Callable[[Any], Any]


class SavedCodes:
    """A cache of the codes that one model's calls save for backward, keyed by the address of the tensor they encode.

    An entry is valid as long as the tensor's storage and the codes exist. A copy or pickle of it is empty.
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
        in_8_bits: bool,
    ) -> tuple[Operand, Tensor]:
        """`ops.operand` of `rows` (x as a matrix), and the codes of its values.

        Matmuls that round the same x alike, with no state and no noise, share both.
        """
        place = place_of(x) if state is None and quantizer.rounding == "nearest_even" else None
        key = None if place is None else (place, quantizer, dtype)
        found = self.find(key)
        if found is not None:
            return Operand(of_codes(found["codes"], quantizer, dtype, in_8_bits), found["scale"]), found["codes"]
        made = operand(rows, quantizer, dtype, state, record, in_8_bits=in_8_bits, seed=seed, coded=True)
        codes = made.codes
        if codes is None:
            in_codes = made.values.dtype in units_mm.DTYPES
            codes = made.values.view(torch.uint8) if in_codes else encode(made.values, quantizer.format)
        if key is not None and made.scale is not None:
            self.note(key, _Entry(x, {"codes": codes, "scale": made.scale}))
        return made, codes

    def around(self, x: Tensor) -> AbstractContextManager[Any]:
        """A context in which tensors of x's shape that autograd saves are stored as the recipe's `nonlinear` says."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        within = top is not None and isinstance(getattr(top[0], "__self__", None), _Hooks)
        if within or not torch.is_grad_enabled() or not _hooks_enabled():
            return nullcontext()
        assert self.saved.nonlinear is not None
        hooks = _Hooks(self, self.saved.nonlinear, x.shape, top)
        return saved_tensors_hooks(hooks.pack, hooks.unpack)

    def find(self, key: Hashable) -> dict[str, Tensor] | None:
        """The tensors cached under a key; None if there are none or they no longer exist."""
        entry = self._kept.get(key)
        return None if entry is None else entry.found()

    def note(self, key: Hashable, entry: "_Entry") -> None:
        """Cache an entry under a key; when the cache is full, drop the entries whose tensors no longer exist."""
        if len(self._kept) >= self._room:
            self._kept = {key: entry for key, entry in self._kept.items() if entry.found() is not None}
            self._room = max(_ROOM, 2 * len(self._kept))
        self._kept[key] = entry


class _Entry:
    """Weak references to the codes of a saved tensor, valid while they and the tensor's storage exist: memory that is
    freed and allocated again holds other values. (A weak reference to a storage also keeps its address from reuse.)"""

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
    """A packed tensor: its codes or its copy in another dtype, each as packed by the outer hooks."""

    __slots__ = ("dtype", "parts", "shape")

    def __init__(self, parts: dict[str, Any], shape: torch.Size, dtype: torch.dtype) -> None:
        self.parts, self.shape, self.dtype = parts, shape, dtype


class SavedTensor:
    """A saved tensor that is not encoded, and its version when autograd saved it."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()  # else its graph is a reference cycle
        self.version = tensor._version

    def unpacked(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written to since; torch does not check tensors that hooks pack.
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
    def __init__(
        self, saved_codes: SavedCodes, storage: Storage, shape: torch.Size, outer: tuple[Hook, Hook] | None
    ) -> None:
        self._saved_codes, self._storage, self._shape = saved_codes, storage, shape
        self._outer = outer
        self._checkpoints = outer is not None and getattr(outer[0], "__module__", "") == checkpoint.__name__
        around = None if outer is None else getattr(outer[0], "__self__", None)
        self._part: Hook | None = getattr(around, "pack_part", None if outer is None else outer[0])

    def pack(self, x: Tensor) -> Any:
        if not self._takes(x):
            return SavedTensor(x) if self._outer is None else self._outer[0](x)
        saved_codes, place = self._saved_codes, place_of(x)
        key = None if place is None else (place, self._storage)
        parts = saved_codes.find(key)
        if parts is None:
            parts = self._made(x.detach())
            if key is not None:
                saved_codes.note(key, _Entry(x, parts))
        packed = parts if self._part is None else {name: self._part(part) for name, part in parts.items()}
        return _Kept(packed, x.shape, x.dtype)

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, SavedTensor):
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
        """Whether x is a plain floating tensor that an operation made, of the module's shape and in another dtype than
        the storage's. In a backward pass a leaf counts too, since reentrant checkpointing detaches its inputs;
        non-reentrant checkpointing does not detach them, and is recognized by its hooks."""
        leaf = x.is_leaf and x.requires_grad and (torch._C._current_graph_task_id() == -1 or self._checkpoints)
        made = foreign(x) is None and not isinstance(x, Parameter) and not leaf and x.layout == torch.strided
        fits = made and x.shape == self._shape and x.dtype in _FLOATS and x.dtype != self._storage.dtype
        return fits and x.numel() > 0 and 0 not in x.stride()


def of_codes(codes: Tensor, quantizer: Quantizer, dtype: torch.dtype, in_8_bits: bool) -> Tensor:
    """The values of an operand with one scale, from its codes: an 8-bit view if `in_8_bits` and native FP8 GEMMs take
    the quantizer, else decoded in a dtype that holds them for a matmul in `dtype`."""
    native, format = scaled_mm.outer_dtype(quantizer, codes.device) if in_8_bits else None, quantizer.format
    if native is not None:
        return codes.view(native)
    values = torch.empty(codes.shape, dtype=carrier(format.key, dtype), device=codes.device)
    decode_into(codes.contiguous(), values, format)
    return values


def place_of(x: Tensor) -> Hashable | None:
    """A key of a tensor's storage, offset, shape, strides, dtype and version, if a differentiated operation made it or
    the tensor that it views; else None: memory from outside (a loader's, numpy's, a receive buffer) may be written to
    without a change of the version."""
    if (x if x._base is None else x._base).grad_fn is None:
        return None
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
