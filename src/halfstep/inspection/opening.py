"""Open a checkpoint of any kind, and scan and judge the values of its tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from halfstep.bits.origin import Origin, origins, stored_format
from halfstep.bits.scan import CHUNK, Progress, Scan, is_small, scan, scan_small
from halfstep.bits.statistics import Statistics, of_scans
from halfstep.errors import CheckpointError
from halfstep.inspection.files import REPEATS, SMALL, Checkpoint, File, Reader, StoredTensor, check_count
from halfstep.inspection.gguf_blocks import DECODED
from halfstep.inspection.layout import Plain, read_together
from halfstep.registry import collect


_HALF = re.compile(r"[\ud800-\udfff]")  # a lone surrogate, which cannot be written as UTF-8
_NAMED = 3  # checkpoints that an error about a folder names


@cache
def readers() -> dict[str, Reader]:
    """Every reader by name; a new kind of checkpoint is one new file in `readers/`."""
    return collect("halfstep.inspection.readers", Reader)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, a file or a folder. Only headers are read; nothing that is stored is run.

    Raises:
        CheckpointError: there is no such path, no reader knows it, or it is broken.
    """
    path = Path(os.path.expanduser(path))
    if not os.path.isdir(path):
        File.of(path)  # says what is wrong with it, if it is no file
    try:
        for reader in readers().values():
            if reader.recognises(path):
                return _checked(reader.open(path))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    raise CheckpointError(f"{str(path)!r} {_unknown(path)}")


def _unknown(path: Path) -> str:
    """What is said of a path that no reader knows: what of it can be opened, if it is a folder."""
    kinds = ", ".join(sorted(readers()))
    if not path.is_dir():
        found = "is not a checkpoint of a known kind" if path.stat().st_size else "is empty"
        return f"{found}; expected one of: {kinds}"
    inner = (found for place in ("*", "snapshots/*") for found in sorted(path.glob(place)))
    known = (found for found in inner if any(reader.recognises(found) for reader in readers().values()))
    near = [str(found) for found in islice(known, _NAMED)]
    hint = f"name one of what it holds: {', '.join(map(repr, near))}" if near else "nothing in it is a checkpoint"
    return f"is a folder, and not one of a known kind (Hugging Face's or torch DCP's); {hint}"


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """What holds for every kind: names are text and differ, and tensors do not claim far more bytes than there are."""
    check_count(len(checkpoint.tensors), checkpoint.path)
    seen: set[str] = set()
    for tensor in checkpoint.tensors:
        if tensor.name in seen:
            raise CheckpointError(
                f"{checkpoint.path}: two tensors are called {tensor.name!r}; open its files one by one"
            )
        seen.add(tensor.name)
    texts = [*seen, *checkpoint.metadata, *checkpoint.metadata.values()]
    if any(map(_HALF.search, texts)):
        raise CheckpointError(f"{checkpoint.path}: a name or a value of the metadata holds half a character")
    claimed = sum(tensor.nbytes for tensor in checkpoint.tensors)
    present = sum(File.of(file).size for file in checkpoint.files)
    if claimed > REPEATS * present + SMALL:
        raise CheckpointError(
            f"{checkpoint.path}: its tensors claim {claimed} bytes and its files have {present}; expected at most "
            f"{REPEATS} times as many and a GiB. Save expanded tensors contiguous, and arrays uncompressed"
        )
    return checkpoint


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
