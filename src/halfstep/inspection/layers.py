"""The quantized layers of a checkpoint, by `schemes.SCHEMES` or as the file describes them; and its weights by name.

Broken layers are described in words. A weight's values are those of a plain tensor, or codes times scales.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.bits.pair import as_numbers
from halfstep.bits.sentences import Layer
from halfstep.bits.values import TYPES, Decoded, InMemory, Shaped, Values, even
from halfstep.errors import CheckpointError
from halfstep.inspection.files import Checkpoint, StoredTensor, parse_object
from halfstep.inspection.gguf_blocks import BLOCKS, UNREAD
from halfstep.inspection.schemes import SCHEMES, Scheme, Shape, block_of, tile_of, written
from halfstep.quant import Quantized, Quantizer, layout
from halfstep.quant.description import KEY, MALFORMED, from_label, restore
from halfstep.quant.quantizer import matrix_shape
from halfstep.text import printable


@dataclass(frozen=True)
class Layers:
    """The quantized layers by the name of the tensor of their codes, and broken ones, in words."""

    by_codes: Mapping[str, Layer]
    findings: tuple[str, ...] = ()

    @property
    def parts(self) -> frozenset[str]:
        """The names of all scales, zero points, tables."""
        return frozenset(part for layer in self.by_codes.values() for part in layer.parts)

    def __add__(self, other: "Layers") -> "Layers":
        return Layers({**self.by_codes, **other.by_codes}, (*self.findings, *other.findings))


def find_layers(tensors: Sequence[StoredTensor]) -> Layers:
    """Every quantized layer, by the names, types and shapes of its tensors; broken ones are findings."""
    names = {tensor.name: tensor for tensor in tensors}
    found: dict[str, Layer] = {}
    findings: list[str] = []
    used: dict[str, Scheme] = {}
    for tensor in tensors:
        tried = [
            (scheme, parts, *_layer(scheme, parts))
            for scheme in SCHEMES
            if tensor.dtype in scheme.dtypes and (parts := _parts(tensor, scheme, names))
        ]
        if tried:
            # Schemes with the same names differ in the parts that they need and in how shapes fit.
            scheme, parts, layer, wrong = min(tried, key=lambda one: (one[2] is None, len(one[3])))
            used |= {part.name: scheme for part in parts.values()}
            found |= {tensor.name: layer} if layer is not None else {}
            findings += wrong
    return Layers(found, (*findings, *_left_over(tensors, used, set(found))))


def _parts(codes: StoredTensor, scheme: Scheme, names: Mapping[str, StoredTensor]) -> dict[str, StoredTensor] | None:
    """The tensors of the layer by suffix, or None where codes and scales do not have the scheme's names and types."""
    if not codes.name.endswith(scheme.codes):
        return None
    stem = codes.name.removesuffix(scheme.codes)
    scale = names.get(stem + scheme.scale)
    if scale is None or scale is codes or scale.dtype not in scheme.scale_dtypes:
        return None
    parts = {suffix: names.get(_name(stem, suffix)) for suffix in (scheme.scale, *scheme.needs, *scheme.may)}
    return {"codes": codes} | {suffix: part for suffix, part in parts.items() if part is not None}


def _name(stem: str, suffix: str) -> str:
    module, dot, _ = stem.rpartition(".")
    return f"{module}{dot}{suffix[1:]}" if suffix.startswith("/") else f"{stem}{suffix}"


def _layer(scheme: Scheme, parts: dict[str, StoredTensor]) -> tuple[Layer | None, list[str]]:
    """The layer, None where its shapes do not fit, and what is wrong with it."""
    codes, scale = parts["codes"], parts[scheme.scale]
    stem = codes.name.removesuffix(scheme.codes)
    missing = [_last(_name(stem, suffix)) for suffix in scheme.needs if suffix not in parts]
    wrong = [f"{codes.name} ({scheme.name}): no {name} beside it" for name in missing]
    shape = scheme.packing.shape(parts)
    values = prod(shape or (0,))
    tile = _tile(scheme, shape, scale.shape) if shape is not None and values else None
    bits = round(8 * codes.nbytes / values) if values else 0
    if tile is None or not 0 < bits <= 8:
        sizes = f"codes of shape {written(codes.shape)}, scales of shape {written(scale.shape)}"
        return None, [f"{codes.name} ({scheme.name}): {sizes} do not fit together"]
    format = f"int{bits}" if scheme.format == "int" else scheme.format or codes.dtype
    held = tuple(part.name for suffix, part in parts.items() if suffix != "codes")
    nbytes = sum(part.nbytes for part in parts.values())
    scale_type = "float8_e8m0fnu" if scale.dtype == "uint8" and not scheme.flat else scale.dtype
    return Layer(codes.name, scheme.name, format, scale_type, tile, values, bits, nbytes, held, scheme.also), wrong


def _tile(scheme: Scheme, shape: Shape, scale: Shape) -> str | None:
    """What shares a scale, in words; None where the shapes do not fit."""
    if scheme.flat:
        size = block_of(prod(shape), prod(scale))
        return f"{size} codes" if size else None
    tile = tile_of(shape, (*scale[:-2], *scale[:-3:-1]) if scheme.turned else scale, scheme.tile)
    return None if tile is None else tile_text(tile, shape)


def tile_text(tile: tuple[int, int], shape: Shape) -> str:
    """A tile of rows and columns, 0 for all, in words."""
    rows, columns = tile
    words = {(0, 0): "tensor", (1, 0): "row", (0, 1): "column"}
    return words.get(tile, f"{rows or (1, *shape)[-2]}x{columns or (1, *shape)[-1]} block")


def _left_over(tensors: Sequence[StoredTensor], used: Mapping[str, Scheme], codes: set[str]) -> Iterator[str]:
    """Findings for tensors with the names and types of other layers' codes or scales that belong to no layer."""
    alike = {(_last(t.name), t.dtype): used[t.name] for t in tensors if t.name in used}
    called = {_last(name) for name in codes}
    for tensor in tensors:
        scheme = alike.get((_last(tensor.name), tensor.dtype))
        if tensor.name in used or scheme is None or len(tensor.shape) == 1:
            continue
        stem = tensor.name.removesuffix(scheme.codes)
        if _last(tensor.name) in called:
            yield f"{tensor.name} ({scheme.name}): no {_last(stem + scheme.scale)} beside it"
        elif tensor.name.endswith(scheme.scale):
            yield f"{tensor.name} ({scheme.name}): a scale without codes"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


_SCHEME = "halfstep"
_LABEL = 1 << 14  # most bytes of a label; that of a codebook of 256 values has some 5,000
_ALSO = {
    "tensor_scale": "and a float32 scale of the tensor",
    "scale_scale": "in groups with scales of their own",
    "zero_point": "and zero points",
    "outliers": "and columns of outliers as they were",
}
"""The text for parts other than codes and scales."""


@dataclass(frozen=True)
class Own:
    """A weight that halfstep quantized, as its file describes it. The names of its parts are STEM + the part's name."""

    stem: str
    quantizer: Quantizer
    shape: tuple[int, ...]
    of: torch.dtype
    expected: Mapping[str, tuple[torch.dtype, tuple[int | None, ...]]]
    """The types and shapes of the parts."""
    label: tuple[str, ...] = ()
    """The tensor that describes the quantizer, where the file has one."""


def described(checkpoint: Checkpoint) -> Layers:
    """The layers of `save_quantized`, `--to` and `quantize_model`, whose quantizers the file describes, and GGUF's
    blocks."""
    names = {tensor.name: tensor for tensor in checkpoint.tensors}
    found, findings = _blocks(checkpoint), list[str]()
    for one in own(checkpoint):
        layer, wrong = (None, [one]) if isinstance(one, str) else _of_own(one, names)
        found |= {layer.codes: layer} if layer is not None and layer.values else {}
        findings += wrong
    return Layers(found, tuple(findings))


def _blocks(checkpoint: Checkpoint) -> dict[str, Layer]:
    """GGUF's layers: codes and scales together in blocks."""
    kinds = {kind.name: kind for kind in BLOCKS.values()}
    return {
        tensor.name: Layer(
            tensor.name,
            f"GGUF {kind.name}",
            kind.name,
            "",
            f"{kind.values} codes",
            tensor.numel,
            8 * kind.nbytes // kind.values,
            tensor.nbytes,
            also=f"and scales in blocks of {kind.values}",
        )
        for tensor in checkpoint.tensors
        if (kind := kinds.get(tensor.dtype)) is not None and tensor.numel
    }


def own(checkpoint: Checkpoint) -> Iterator[Own | str]:
    """The weights that halfstep quantized; for descriptions that cannot be read, an error as text."""
    yield from _from_metadata(checkpoint)
    yield from _from_labels(checkpoint)


def _from_metadata(checkpoint: Checkpoint) -> Iterator[Own | str]:
    """The weights that `save_quantized` wrote."""
    text = checkpoint.metadata.get(KEY, "{}")
    try:
        entries = parse_object(text.encode(), f"the metadata {KEY!r}")
    except CheckpointError as error:
        yield str(error)
        return
    for name, data in entries.items():
        try:
            quantizer, shape, dtype = restore(data)
            yield Own(f"{name}.", quantizer, shape, dtype, layout(quantizer, shape, dtype))
        except MALFORMED as error:
            yield f"{name} ({_SCHEME}): what the file says of it cannot be read: {str(error)[:200]}"


def _from_labels(checkpoint: Checkpoint) -> Iterator[Own | str]:
    """The weights that `quantize_model` made: NAME_format holds a label of the codes in NAME_codes."""
    names = {tensor.name: tensor for tensor in checkpoint.tensors}
    for codes in checkpoint.tensors:
        stem = codes.name.removesuffix("codes")
        label = names.get(f"{stem}format")
        if not codes.name.endswith("_codes") or label is None or label.dtype != "uint8" or label.numel > _LABEL:
            continue
        said = b"".join(piece.tobytes() for piece in label.chunks(_LABEL)).decode(errors="replace")
        try:
            quantizer = from_label(said)
        except MALFORMED:
            yield f"{codes.name} ({_SCHEME}): its format {said[:80]!r} is not known here"
            continue
        *lead, rows, columns = (1, 1, *codes.shape)[-max(len(codes.shape), 2) :]
        columns = columns * 8 // quantizer.format.bits if quantizer.format.bits in (4, 6) else columns
        of_one = layout(quantizer, (rows, columns), torch.float32)
        of_all = {part: (dtype, (*lead, *shape)) for part, (dtype, shape) in of_one.items()}
        yield Own(stem, quantizer, (*lead, rows, columns), torch.float32, of_all, (label.name,))


def _of_own(own: Own, names: Mapping[str, StoredTensor]) -> tuple[Layer | None, list[str]]:
    """The layer, None where it is broken, and what is wrong with it."""
    wrong, parts = [], {}
    for part in sorted(own.expected, key=("codes", "scale").__contains__, reverse=True):
        (dtype, shape), found = own.expected[part], names.get(f"{own.stem}{part}")
        if found is None:
            wrong.append(f"no {part} beside it")
            continue
        parts[part] = found
        kind = str(dtype).removeprefix("torch.")
        fits = len(found.shape) == len(shape) and all(b in (a, None) for a, b in zip(found.shape, shape, strict=True))
        if found.dtype != kind or not fits:
            sizes = written(tuple("any" if size is None else size for size in shape))
            wrong.append(f"{part} of shape {written(found.shape)} in {found.dtype}; expected {sizes} in {kind}")
    if wrong:
        return None, [f"{own.stem}codes ({_SCHEME}): {text}" for text in wrong]
    scales, matrix = own.quantizer.scales, matrix_shape(own.shape)

    return Layer(
        parts["codes"].name,
        _SCHEME,
        printable(str(own.quantizer.format.name)[:40]),
        scales.rule.holds if scales else "",
        tile_text((scales.tile.rows, scales.tile.columns), matrix) if scales else "",
        prod(matrix),
        own.quantizer.format.bits,
        sum(found.nbytes for found in parts.values()),
        (*(found.name for part, found in parts.items() if part != "codes"), *own.label),
        " ".join(text for part, text in _ALSO.items() if part in parts),
    ), []


HELD = 1 << 30
"""The most bytes of a tensor that is read whole to be reordered."""


@dataclass(frozen=True)
class Held(Shaped):
    """A reordered tensor, in memory."""

    held: NDArray[Any]
    dtype: str
    shape: Shape

    @classmethod
    def turned(cls, matrix: Values) -> "Held":
        """The transposed matrix."""
        rows, columns = matrix.shape
        return cls(_whole(matrix).reshape(rows, columns).T, matrix.dtype, (columns, rows))

    @classmethod
    def ordered(cls, tensor: Values, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> "Held":
        """A tensor with the slices of its first two dimensions reordered by these indices."""
        return cls(_whole(tensor).reshape(rows.size, columns.size, -1)[rows][:, columns], tensor.dtype, tensor.shape)

    def chunks(self, nbytes: int) -> Iterator[NDArray[Any]]:
        """The values in row-major order, copied."""
        each = max(nbytes // self.held.itemsize, 1)
        rows = max(each * len(self.held) // max(self.numel, 1), 1)
        for first in range(0, len(self.held), rows):
            flat = np.ascontiguousarray(self.held[first : first + rows]).ravel()
            flat.flags.writeable = False  # as a file's pieces are: kernels are compiled for read-only arrays
            yield from (flat[i : i + each] for i in range(0, flat.size, each))


def _whole(tensor: Values) -> NDArray[Any]:
    return np.concatenate([piece.copy() for piece in tensor.chunks(1 << 24)])


@dataclass(frozen=True)
class First(Shaped):
    """The first values of a tensor, as many as `shape` has."""

    whole: Values
    shape: Shape

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """The dtype of the whole tensor."""
        return self.whole.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of these values."""
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
    """One-byte codes times their scales, in float32: `tile` rows and columns share a scale, 0 for all of them."""

    codes: Values
    scales: Values
    tile: tuple[int, int]
    divisor: float = 1.0
    """The divisor of scales: bitsandbytes stores the amax of a row."""

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """The shape of the codes."""
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
    """Scales in float32; bytes are E8M0."""
    return as_numbers(piece, "float8_e8m0fnu" if dtype == "uint8" else dtype).astype(np.float32)


_SCALED: Mapping[str, tuple[tuple[int, int] | None, float]] = {
    "fine-grained FP8": ((128, 128), 1.0), "FP8": (None, 1.0), "MXFP8": ((1, 32), 1.0), "int8": (None, 1.0),
    "bitsandbytes int8": (None, 127.0), "torchao": (None, 1.0),
}  # fmt: skip
"""The schemes of one-byte codes whose values are code times scale: the default tile, and the divisor of scales."""


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
    """A tensor that halfstep quantized, decoded as a whole when it is read."""

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
    """Every weight by name. Scales and other parts of quantized layers are no weights; tied weights have an entry per
    name."""
    layers = find_layers(checkpoint.tensors) + described(checkpoint)
    stored = {tensor.name: tensor for tensor in checkpoint.tensors}
    ours, parts, found = _ours(checkpoint, stored), layers.parts, dict[str, Weight]()
    for tensor in checkpoint.tensors:
        layer = layers.by_codes.get(tensor.name)
        if tensor.name in parts:
            continue
        weight = (
            Weight(tensor.name, tensor.dtype, tensor.shape, tensor, None if tensor.dtype in UNREAD else tensor)
            if layer is None or (not layer.parts and layer.scheme.startswith("GGUF"))  # its reader decodes the codes
            else _coded(layer, stored, ours)
        )
        # Codes keep their own name where the file has a tensor with the weight's name too.
        name = tensor.name if weight.name in stored else weight.name
        found[name] = Weight(name, weight.stored, weight.shape, tensor, weight.values)
    return found


def _coded(layer: Layer, stored: Mapping[str, StoredTensor], ours: Mapping[str, Restored]) -> Weight:
    codes, name = stored[layer.codes], layer.codes
    for suffix in ("_packed", "_qdata", "_blocks", ".codes", "_codes"):
        name = name.removesuffix(suffix)
    if name.endswith(".qweight"):
        name = f"{name.removesuffix('.qweight')}.weight"
    if (restored := ours.get(layer.codes)) is not None:
        return Weight(name, f"{layer.scheme} {layer.format}", restored.shape, codes, restored)
    values = _scaled(layer, codes, stored)
    return Weight(name, layer.scheme, codes.shape if values is None else values.shape, codes, values)


def _scaled(layer: Layer, codes: StoredTensor, stored: Mapping[str, StoredTensor]) -> Scaled | None:
    if layer.scheme not in _SCALED or layer.code_bits != 8 or any("zero_point" in part for part in layer.parts):
        return None
    first, divisor = _SCALED[layer.scheme]
    scales = stored[layer.parts[0]]
    tile = tile_of(codes.shape, scales.shape, first)
    return Scaled(codes, scales, tile, divisor) if tile is not None and len(codes.shape) > 1 else None


def _ours(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor]) -> dict[str, Restored]:
    """The weights that `save_quantized`, `--to` and `quantize_model` wrote, by the names of their codes; not stacks of
    labelled codes."""
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
