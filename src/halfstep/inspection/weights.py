"""The weights of a checkpoint by name: plain tensors as they are, codes with scales as the values they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from halfstep.bits.layer import Layer
from halfstep.bits.values import Decoded, InMemory, Values
from halfstep.inspection.described import described, own
from halfstep.inspection.gguf_blocks import UNREAD
from halfstep.inspection.layers import find_layers
from halfstep.inspection.schemes import tile_of
from halfstep.inspection.stored import Checkpoint, StoredTensor
from halfstep.inspection.views import Scaled
from halfstep.quant import Quantizer
from halfstep.quant.quantizer import Quantized


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
