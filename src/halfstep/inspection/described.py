"""Quantised layers that a file describes itself: those that halfstep writes, and GGUF's types of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from halfstep.bits.layer import Layer
from halfstep.errors import CheckpointError
from halfstep.inspection.gguf_blocks import BLOCKS
from halfstep.inspection.layers import Layers, tile_text, written
from halfstep.inspection.limits import parse_object
from halfstep.inspection.stored import Checkpoint, StoredTensor
from halfstep.printable import printable
from halfstep.quant import Quantizer
from halfstep.quant.description import KEY, MALFORMED, from_label, restore
from halfstep.quant.quantizer import layout, matrix_shape


_SCHEME = "halfstep"
_LABEL = 1 << 14  # bytes of the longest label; that of a codebook of 256 values has some 5,000
_ALSO = {
    "tensor_scale": "and a float32 scale of the tensor",
    "scale_scale": "in groups with scales of their own",
    "zero_point": "and zero points",
    "outliers": "and columns of outliers as they were",
}
"""What the text says of parts beside codes and scales."""


@dataclass(frozen=True)
class Own:
    """A weight that halfstep quantised, as its file describes it. Its parts are called STEM + the name of the part."""

    stem: str
    quantizer: Quantizer
    shape: tuple[int, ...]
    of: torch.dtype
    expected: Mapping[str, tuple[torch.dtype, tuple[int | None, ...]]]
    """The types and shapes of the parts."""
    label: tuple[str, ...] = ()
    """The tensor that says how it was quantised, where that is none of the parts."""


def described(checkpoint: Checkpoint) -> Layers:
    """The layers of `save_quantized`, `--to` and `quantize_model`, whose quantizers the file names, and GGUF's."""
    names = {tensor.name: tensor for tensor in checkpoint.tensors}
    found, findings = _blocks(checkpoint), list[str]()
    for one in own(checkpoint):
        layer, wrong = (None, [one]) if isinstance(one, str) else _layer(one, names)
        found |= {layer.codes: layer} if layer is not None and layer.values else {}
        findings += wrong
    return Layers(found, tuple(findings))


def _blocks(checkpoint: Checkpoint) -> dict[str, Layer]:
    """GGUF's: codes and scales together in blocks."""
    kinds, found = {kind.name: kind for kind in BLOCKS.values()}, {}
    for tensor in checkpoint.tensors:
        if (kind := kinds.get(tensor.dtype)) is not None and tensor.numel:
            bits, also = 8 * kind.nbytes // kind.values, f"and scales in blocks of {kind.values}"
            tile = f"{kind.values} codes"
            found[tensor.name] = Layer(
                tensor.name, f"GGUF {kind.name}", kind.name, "", tile, tensor.numel, bits, tensor.nbytes, also=also
            )
    return found


def own(checkpoint: Checkpoint) -> Iterator[Own | str]:
    """The weights that halfstep quantised; in words, what of their descriptions cannot be read."""
    yield from _from_metadata(checkpoint)
    yield from _from_labels(checkpoint)


def _from_metadata(checkpoint: Checkpoint) -> Iterator[Own | str]:
    """What `save_quantized` wrote."""
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
    """What `quantize_model` made: NAME_format holds a label of the codes in NAME_codes."""
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
        expected = layout(quantizer, (rows, columns), torch.float32)
        of_all = {part: (dtype, (*lead, *shape)) for part, (dtype, shape) in expected.items()}
        yield Own(stem, quantizer, (*lead, rows, columns), torch.float32, of_all, (label.name,))


def _layer(own: Own, names: Mapping[str, StoredTensor]) -> tuple[Layer | None, list[str]]:
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
    names_of = tuple(found.name for part, found in parts.items() if part != "codes")
    return Layer(
        parts["codes"].name,
        _SCHEME,
        printable(str(own.quantizer.format.name)[:40]),
        scales.rule.holds if scales else "",
        tile_text((scales.tile.rows, scales.tile.columns), matrix) if scales else "",
        prod(matrix),
        own.quantizer.format.bits,
        sum(found.nbytes for found in parts.values()),
        (*names_of, *own.label),
        " ".join(text for part, text in _ALSO.items() if part in parts),
    ), []
