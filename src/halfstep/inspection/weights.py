"""The weights of a checkpoint by name: plain tensors as they are, codes with scales as the values they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.bits.pair import as_numbers
from halfstep.bits.sentences import Layer
from halfstep.bits.values import TYPES, Decoded, InMemory, Shaped, Values, even
from halfstep.inspection.files import Checkpoint, StoredTensor
from halfstep.inspection.gguf_blocks import UNREAD
from halfstep.inspection.layers import described, find_layers, own
from halfstep.inspection.schemes import Shape, tile_of
from halfstep.quant import Quantized, Quantizer


HELD = 1 << 30
"""Bytes of a tensor that is read whole to be put in another order."""


@dataclass(frozen=True)
class Held(Shaped):
    """A tensor put in another order: the whole of it is in memory."""

    held: NDArray[Any]
    dtype: str
    shape: Shape

    @classmethod
    def turned(cls, matrix: Values) -> Held:
        """The transposed matrix."""
        rows, columns = matrix.shape
        return cls(_whole(matrix).reshape(rows, columns).T, matrix.dtype, (columns, rows))

    @classmethod
    def ordered(cls, tensor: Values, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Held:
        """A tensor with the slices of its first two dimensions in the order that their indices have here."""
        values = _whole(tensor).reshape(rows.size, columns.size, -1)[rows]
        return cls(values[:, columns], tensor.dtype, tensor.shape)

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.held.nbytes

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order, copied."""
        each = max(nbytes // self.held.itemsize, 1)
        rows = max(each * len(self.held) // max(self.numel, 1), 1)
        for first in range(0, len(self.held), rows):
            flat = np.ascontiguousarray(self.held[first : first + rows]).ravel()
            flat.flags.writeable = False  # as a file's pieces are: kernels are compiled for those
            yield from (flat[i : i + each] for i in range(0, flat.size, each))


def _whole(tensor: Values) -> NDArray[Any]:
    return np.concatenate([piece.copy() for piece in tensor.chunks(1 << 24)])


@dataclass(frozen=True)
class First(Shaped):
    """The first values of a tensor, as many as a `shape` has."""

    whole: Values
    shape: Shape

    @property
    def dtype(self) -> str:
        """That of the whole."""
        return self.whole.dtype

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self.whole.nbytes * self.numel // self.whole.numel

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order."""
        left = self.numel
        for piece in self.whole.chunks(nbytes):
            if left:
                yield piece[:left]
            left -= min(left, piece.size)
            if not left:
                return


@dataclass(frozen=True)
class Scaled(Decoded):
    """Codes of a byte each times their scales, in float32: `tile` rows and columns share one, 0 for all of them."""

    codes: Values
    scales: Values
    tile: tuple[int, int]
    divisor: float = 1.0
    """By which scales are divided first: bitsandbytes keeps the largest magnitude of a row."""

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """That of the codes."""
        return self.codes.shape

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order."""
        columns = self.shape[-1]
        high = self.tile[0] or self.shape[-2] if len(self.shape) > 1 else 1
        wide, across = self.tile[1] or columns, -(-columns // (self.tile[1] or columns))
        scales = np.concatenate([_scales(piece, self.scales.dtype) for piece in self.scales.chunks(1 << 20)])
        scales = (scales / np.float32(self.divisor)).reshape(-1, across)
        each = max(nbytes // 4, 1)
        rows = max(each // columns, 1)
        for i, piece in enumerate(even(self.codes, rows * columns)):
            values = as_numbers(piece, self.codes.dtype).astype(np.float32).reshape(-1, columns)
            down = (i * rows + np.arange(len(values))) // high if len(scales) > 1 else np.zeros(len(values), np.int64)
            found = (values * np.repeat(scales[down], wide, axis=1)[:, :columns]).ravel().view(TYPES["float32"].piece)
            yield from (found[at : at + each] for at in range(0, found.size, each))


def _scales(piece: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Scales in float32; bytes are E8M0's exponents."""
    return as_numbers(piece, "float8_e8m0fnu" if dtype == "uint8" else dtype).astype(np.float32)


_SCALED: Mapping[str, tuple[tuple[int, int] | None, float]] = {
    "fine-grained FP8": ((128, 128), 1.0), "FP8": (None, 1.0), "MXFP8": ((1, 32), 1.0), "int8": (None, 1.0),
    "bitsandbytes int8": (None, 127.0), "torchao": (None, 1.0),
}  # fmt: skip
"""The schemes of a byte a code, whose values are code times scale: the usual tile, and what divides a scale."""

_SUFFIXES = ("_packed", "_qdata", "_blocks", ".codes", "_codes")


@dataclass(frozen=True)
class Weight:
    """One weight. `stored` is its type, or the scheme of its codes; `values` is None where these are not decoded."""

    name: str
    stored: str
    shape: tuple[int, ...]
    tensor: StoredTensor
    values: Values | None


@dataclass(frozen=True)
class Restored(Decoded):
    """What a quantizer of ours stored, decoded as a whole when it is read."""

    quantizer: Quantizer
    shape: tuple[int, ...]
    of: torch.dtype
    parts: Mapping[str, StoredTensor]

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order."""
        held = {part: _tensor(stored) for part, stored in self.parts.items()}
        decoded = Quantized(self.quantizer, self.shape, self.of, held).dequantize(torch.float32)
        yield from InMemory(decoded).chunks(nbytes)


def weights(checkpoint: Checkpoint) -> dict[str, Weight]:
    """Every weight by name. Scales and other parts of quantised layers are no weights; tied ones have each name."""
    layers = find_layers(checkpoint.tensors) + described(checkpoint)
    stored = {tensor.name: tensor for tensor in checkpoint.tensors}
    ours, parts, found = _ours(checkpoint, stored), layers.parts, dict[str, Weight]()
    for tensor in checkpoint.tensors:
        layer = layers.by_codes.get(tensor.name)
        if tensor.name in parts:
            continue
        weight = _plain(tensor) if layer is None or layer.codes in _blocks(layer) else _coded(layer, stored, ours)
        # Codes whose weight is there beside them keep the name that they have.
        name = tensor.name if weight.name in stored else weight.name
        found[name] = Weight(name, weight.stored, weight.shape, tensor, weight.values)
    return found


def _blocks(layer: Layer) -> tuple[str, ...]:
    """GGUF's codes come decoded, under the name of their weight."""
    return (layer.codes,) if not layer.parts and layer.scheme.startswith("GGUF") else ()


def _plain(tensor: StoredTensor) -> Weight:
    values = None if tensor.dtype in UNREAD else tensor
    return Weight(tensor.name, tensor.dtype, tensor.shape, tensor, values)


def _coded(layer: Layer, stored: Mapping[str, StoredTensor], ours: Mapping[str, Restored]) -> Weight:
    codes, name = stored[layer.codes], layer.codes
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    if name.endswith(".qweight"):
        name = f"{name.removesuffix('.qweight')}.weight"
    if layer.codes in ours:
        restored = ours[layer.codes]
        return Weight(name, f"{layer.scheme} {layer.format}", restored.shape, codes, restored)
    values = _scaled(layer, codes, stored)
    kept = values.shape if values is not None else codes.shape
    return Weight(name, layer.scheme, kept, codes, values)


def _scaled(layer: Layer, codes: StoredTensor, stored: Mapping[str, StoredTensor]) -> Scaled | None:
    if layer.scheme not in _SCALED or layer.code_bits != 8 or any("zero_point" in part for part in layer.parts):
        return None
    first, divisor = _SCALED[layer.scheme]
    scales = stored[layer.parts[0]]
    tile = tile_of(codes.shape, scales.shape, first)
    return Scaled(codes, scales, tile, divisor) if tile is not None and len(codes.shape) > 1 else None


def _ours(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor]) -> dict[str, Restored]:
    """What `save_quantized`, `--to` and `quantize_model` wrote, by the names of their codes; no stacks of labels."""
    found = {}
    for one in own(checkpoint):
        if not isinstance(one, str):
            parts = {part: stored[one.stem + part] for part in one.expected if one.stem + part in stored}
            if len(parts) == len(one.expected) and (not one.label or len(parts["codes"].shape) == 2):
                found[parts["codes"].name] = Restored(one.quantizer, one.shape, one.of, parts)
    return found


def _tensor(stored: StoredTensor) -> torch.Tensor:
    data = b"".join(piece.tobytes() for piece in stored.chunks())
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, stored.dtype)).view(stored.shape)
