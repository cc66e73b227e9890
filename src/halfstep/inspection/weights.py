"""The weights of a checkpoint by name: plain tensors as they are, codes with scales as the values they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.bits.layer import Layer
from halfstep.bits.values import InMemory, Values
from halfstep.errors import CheckpointError
from halfstep.inspection.described import described
from halfstep.inspection.gguf_blocks import UNREAD
from halfstep.inspection.layers import find_layers
from halfstep.inspection.limits import parse_object
from halfstep.inspection.schemes import tile_of
from halfstep.inspection.stored import Checkpoint, StoredTensor
from halfstep.inspection.views import Scaled
from halfstep.quant import Quantizer
from halfstep.quant.description import KEY, MALFORMED, from_label, restore
from halfstep.quant.quantizer import Quantized, layout


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
class Restored:
    """What a quantizer of ours stored, decoded as a whole when it is read."""

    quantizer: Quantizer
    shape: tuple[int, ...]
    of: torch.dtype
    parts: Mapping[str, StoredTensor]

    dtype = "float32"

    @property
    def numel(self) -> int:
        """The number of values."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """The bytes of the values."""
        return 4 * self.numel

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
    """What `save_quantized`, `--to` and `quantize_model` wrote, by the names of their codes."""
    try:
        entries = parse_object(checkpoint.metadata.get(KEY, "{}").encode(), f"the metadata {KEY!r}")
    except CheckpointError:  # `described` says so
        entries = {}
    found = _labelled(stored)
    for name, data in entries.items():
        try:
            quantizer, shape, dtype = restore(data)
            parts = {part: stored[f"{name}.{part}"] for part in data["tensors"]}
        except (*MALFORMED, KeyError):
            continue
        found[f"{name}.codes"] = Restored(quantizer, shape, dtype, parts)
    return found


def _labelled(stored: Mapping[str, StoredTensor]) -> dict[str, Restored]:
    """The matrices of `quantize_model`, whose quantizer stands beside them as a label."""
    found = {}
    for codes in stored.values():
        stem = codes.name.removesuffix("codes")
        label = stored.get(f"{stem}format")
        if not codes.name.endswith("_codes") or label is None or len(codes.shape) != 2 or label.dtype != "uint8":
            continue
        try:
            quantizer = from_label(b"".join(piece.tobytes() for piece in label.chunks()).decode(errors="replace"))
        except MALFORMED:
            continue
        rows, columns = codes.shape
        shape = rows, columns * 8 // quantizer.format.bits if quantizer.format.bits in (4, 6) else columns
        parts = {part: stored.get(f"{stem}{part}") for part in layout(quantizer, shape, torch.float32)}
        held = {part: one for part, one in parts.items() if one is not None}
        if len(held) == len(parts):
            found[codes.name] = Restored(quantizer, shape, torch.float32, held)
    return found


def _tensor(stored: StoredTensor) -> torch.Tensor:
    data = b"".join(piece.tobytes() for piece in stored.chunks())
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, stored.dtype)).view(stored.shape)
