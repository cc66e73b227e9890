"""The values of tensors, scanned and judged in the tensors' order: many small ones at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfstep.bits.origin import Origin, origins, stored_format
from halfstep.bits.scan import CHUNK, Progress, Scan, is_small, scan, scan_small
from halfstep.bits.statistics import Statistics, of_scans
from halfstep.inspection.gguf_blocks import DECODED
from halfstep.inspection.layout import Plain, read_together
from halfstep.inspection.stored import StoredTensor


_TENSORS, _VALUES = 256, 1 << 20  # that are held at once


@dataclass(frozen=True)
class Read:
    """What the values of a tensor say. Of blocks that come decoded, their origin is not looked for."""

    tensor: StoredTensor
    scan: Scan
    statistics: Statistics
    origin: Origin | None


def read(tensors: Sequence[StoredTensor], progress: Progress | None = None) -> Iterator[Read]:
    """Each of some `readable` tensors, in order; the small ones of a window are read and judged together."""
    for window in _windows(tensors):
        small = {one.tensor.name: one for one in _read_small([x for x in window if is_small(x)], progress)}
        for tensor in window:
            yield small.get(tensor.name) or _judged([tensor], [scan(tensor, progress)])[0]


def _windows(tensors: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    window, values = list[StoredTensor](), 0
    for tensor in tensors:
        more = tensor.numel if is_small(tensor) else 0
        if len(window) == _TENSORS or values + more > _VALUES:
            yield window
            window, values = [], 0
        window.append(tensor)
        values += more
    yield window


def _read_small(tensors: Sequence[StoredTensor], progress: Progress | None) -> Iterator[Read]:
    plain = {tensor.name: tensor.source for tensor in tensors if isinstance(tensor.source, Plain) and tensor.numel}
    at_hand = read_together(plain)
    pieces = {one.name: [at_hand[one.name]] if one.name in at_hand else [*one.chunks(CHUNK)] for one in tensors}
    if progress is not None:
        progress(sum(tensor.nbytes for tensor in tensors))
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        yield from _judged(same, scan_small(same, [piece for tensor in same for piece in pieces[tensor.name]]))


def _judged(tensors: Sequence[StoredTensor], scans: Sequence[Scan]) -> list[Read]:
    """Scans of tensors of one type, with what they say."""
    dtype = tensors[0].dtype
    said = [None] * len(scans) if dtype in DECODED else origins(scans, dtype)
    return list(map(Read, tensors, scans, of_scans(scans, stored_format(dtype)), said))
