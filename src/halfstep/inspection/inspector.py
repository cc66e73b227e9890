"""Opens checkpoints of any kind and inspects them in one pass: verdicts by tensor, by role and in all."""

import gc
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from halfstep.bits.origin import Origin, origins, stored_format
from halfstep.bits.pair import Pair, same_bytes
from halfstep.bits.scan import (
    CHUNK,
    Progress,
    Scan,
    Statistics,
    is_small,
    of_scans,
    of_table,
    readable,
    scan,
    scan_small,
)
from halfstep.bits.sentences import Evidence, summed, verdict, whole
from halfstep.bits.table import EMPTY, Table, total
from halfstep.bits.values import Values
from halfstep.bits.what_if import Trials
from halfstep.errors import CheckpointError
from halfstep.inspection.files import (
    REPEATS,
    SMALL,
    Checkpoint,
    File,
    Plain,
    Reader,
    StoredTensor,
    check_count,
    read_together,
)
from halfstep.inspection.gguf_blocks import DECODED, UNREAD
from halfstep.inspection.layers import Layers, described, find_layers
from halfstep.inspection.report import Inspection, Known, RoleReport, TensorReport, contradictions, disagreements
from halfstep.inspection.roles import NAMES, WEIGHTS, role_of
from halfstep.kernels.cpu import bits as kernel
from halfstep.registry import family
from halfstep.text import grouped


_HALF = re.compile(r"[\ud800-\udfff]")  # a lone surrogate, which cannot be written as UTF-8
_NAMED = 3  # checkpoints that an error about a folder names


readers = family("halfstep.inspection.readers", Reader)
"""All readers by name; a new kind of checkpoint is one new file in `readers/`."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, a file or a folder. Only headers are read; no stored code is executed.

    Raises:
        CheckpointError: the path does not exist, no reader recognises it, or it is broken.
    """
    path = Path(os.path.expanduser(path))
    if not os.path.isdir(path):
        File.of(path)  # raises if it is no regular file
    try:
        for reader in readers().values():
            if reader.recognises(path):
                return _checked(reader.open(path))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    raise CheckpointError(f"{str(path)!r} {_unknown(path)}")


def _unknown(path: Path) -> str:
    """The message for a path that no reader recognises; for a folder it names checkpoints in it."""
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
    """The checkpoint, after checks for every kind: names are valid text and distinct, and tensors do not claim far more
    bytes than the files have."""
    check_count(len(checkpoint.tensors), checkpoint.path)
    seen: set[str] = set()
    for tensor in checkpoint.tensors:
        if tensor.name in seen:
            raise CheckpointError(
                f"{checkpoint.path}: two tensors are called {tensor.name!r}; open its files one by one"
            )
        seen.add(tensor.name)
    if any(map(_HALF.search, [*seen, *checkpoint.metadata, *checkpoint.metadata.values()])):
        raise CheckpointError(f"{checkpoint.path}: a name or a value of the metadata holds half a character")
    claimed = sum(tensor.nbytes for tensor in checkpoint.tensors)
    present = sum(File.of(file).size for file in checkpoint.files)
    if claimed > REPEATS * present + SMALL:
        raise CheckpointError(
            f"{checkpoint.path}: its tensors claim {claimed} bytes and its files have {present}; expected at most "
            f"{REPEATS} times as many and a GiB. Save expanded tensors contiguous, and arrays uncompressed"
        )
    return checkpoint


_TENSORS, _VALUES = 256, 1 << 20  # small tensors, and their values, held at once


@dataclass(frozen=True)
class Read:
    """The scan, statistics and origin of a tensor. For GGUF's blocks, which are decoded, there is no origin."""

    tensor: StoredTensor
    scan: Scan
    statistics: Statistics
    origin: Origin | None


def read(tensors: Sequence[StoredTensor], progress: Progress | None = None) -> Iterator[Read]:
    """Read each of some `readable` tensors, in order; the small ones of a window are read and judged together."""
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
    """Scans of tensors of one type, with statistics and origins."""
    dtype = tensors[0].dtype
    said = [None] * len(scans) if dtype in DECODED else origins(scans, dtype)
    return list(map(Read, tensors, scans, of_scans(scans, stored_format(dtype)), said))


_TOGETHER = 256  # tables that are added at once
_PACKED = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
"""The types in which quantizers store codes, one or several per element."""


@contextmanager
def _no_collections() -> Iterator[None]:
    """A context without Python's cyclic garbage collection: it would traverse all records of a checkpoint, which have
    no cycles, repeatedly, for a third of the time of inspecting one with 120,000 tensors."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_no_collections()
def inspect(
    path: str | Path | Checkpoint,
    *,
    quick: bool = False,
    casts: Sequence[str] = (),
    known: Known | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Inspect a checkpoint: which types its values went through, as their bits show, and the statistics behind that.

    Args:
        path: a file or a folder that `open_checkpoint` reads, or its result.
        quick: only look for the last mantissa bit in use, at memory speed; nothing is counted.
        casts: formats to try on every matrix (`what_if.CANDIDATES`, or "all"), which are read a second time.
        known: statements about the model from elsewhere, to be compared with.
        progress: called with the number of bytes after each piece that was read.

    Raises:
        CheckpointError: there is no checkpoint at the path, it is broken, or it was changed meanwhile.
        QuantizationError: an unknown format among `casts`.
    """
    trials = Trials(() if quick else casts)
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    stored: dict[str, TensorReport] = {}
    seen, tables = dict[tuple[object, ...], StoredTensor](), dict[str, Table]()
    tensors = []
    layers = find_layers(checkpoint.tensors) + described(checkpoint)
    parts = layers.parts
    shown = {file: _shown(file, checkpoint) for file in {tensor.file for tensor in checkpoint.tensors}}
    values = read([] if quick else [tensor for tensor in _once(checkpoint.tensors) if _is_read(tensor)], progress)
    counted: list[tuple[str, Table]] = []
    for tensor in checkpoint.tensors:
        role = "scales" if tensor.name in parts else role_of(tensor.name)
        if tensor.nbytes and tensor.storage in stored:
            first = stored[tensor.storage]
            tensors.append(replace(first, name=tensor.name, role=role, tied_to=first.name, duplicate_of=None))
            continue
        figures, said, duplicate = None, None, None
        if quick:
            said = quick_origin(tensor, progress)
        elif _is_read(tensor):
            one = next(values)
            figures, said, duplicate = one.statistics, one.origin, _earlier(seen, tensor, one.scan)
            if role != "scales":
                trials.add(tensor.name, tensor, one.scan, progress)
            counted.append((role, one.scan.table))
            if len(counted) == _TOGETHER:
                _add(tables, counted)
        elif progress is not None:
            progress(tensor.nbytes)
        found = TensorReport(
            tensor.name, role, tensor.dtype, tensor.shape, tensor.numel, tensor.nbytes, shown[tensor.file],
            figures, said, duplicate_of=duplicate,
        )  # fmt: skip
        stored[tensor.storage] = found
        tensors.append(found)
    _add(tables, counted)
    tensors, findings = _confirmed(tensors, layers)
    report = _report(checkpoint, tuple(tensors), tables, quick, known)
    return replace(report, findings=findings, casts=trials.found(), remarks=checkpoint.remarks)


def _is_read(tensor: StoredTensor) -> bool:
    """Whether the tensor's values are counted."""
    return readable(tensor) and tensor.dtype not in UNREAD


def _once(tensors: Sequence[StoredTensor]) -> Collection[StoredTensor]:
    """The first of the tensors that are stored in the same bytes."""
    same = grouped(((tensor.storage, "" if tensor.nbytes else tensor.name), tensor) for tensor in tensors)
    return [found[0] for found in same.values()]


def _add(tables: dict[str, Table], counted: list[tuple[str, Table]]) -> None:
    """Add the counted tables to those of their roles, and clear the list."""
    for role in {role for role, _ in counted}:
        tables[role] = total([tables.get(role, EMPTY), *(table for one, table in counted if one == role)])
    counted.clear()


def _confirmed(tensors: list[TensorReport], layers: Layers) -> tuple[list[TensorReport], tuple[str, ...]]:
    """Each tensor of codes with its layer, checked against the bits of its scales; and the findings where these do not
    fit."""
    counted = {tensor.name: tensor.statistics for tensor in tensors if tensor.role == "scales" and tensor.statistics}
    findings, found = list(layers.findings), []
    for tensor in tensors:
        layer = layers.by_codes.get(tensor.name)
        scales = counted.get(layer.parts[0]) if layer is not None and layer.parts else None
        if layer is not None and scales is not None:
            if scales.nonfinite:
                findings.append(f"{layer.parts[0]}: {scales.nonfinite} of {scales.values} scales are not finite")
            powers = scales.significant_bits == 1 and scales.nonzero > 1 and layer.scale != "float8_e8m0fnu"
            layer = replace(layer, powers=powers)
        found.append(tensor if layer is None else replace(tensor, layer=layer))
    return found, tuple(findings)


def _report(
    checkpoint: Checkpoint,
    tensors: tuple[TensorReport, ...],
    tables: dict[str, Table],
    quick: bool,
    known: Known | None,
) -> Inspection:
    own = [tensor for tensor in tensors if tensor.tied_to is None]
    said = [(tensor, _evidence(tensor)) for tensor in own]
    roles = [_role(role, [one for one in said if one[0].role == role], tables) for role in NAMES]
    present = tuple(role for role in roles if role.tensors)
    # A file with optimizer state alone is judged by that; its step counts and the like are scalars.
    model = [(tensor, one) for tensor, one in said if tensor.role in WEIGHTS]
    weights = [one for _, one in model] if any(tensor.numel > 1 for tensor, _ in model) else []
    judged = {role.role: role.verdict for role in present if role.role in WEIGHTS or not weights}
    config = _config_dtype(checkpoint)
    found = whole(judged, weights or [one for _, one in said])
    masters = [role.verdict.text for role in present if role.role == "master" and weights]
    quantised = [tensor.layer for tensor in own if tensor.layer is not None]
    if masters:
        found = replace(found, text=f"{found.text}. Beside them master copies: {masters[0]}")
    schemes = summed(quantised)
    if schemes:
        found = replace(found, text=f"{found.text}. In all {', '.join(one.size for one in schemes)}")
    return Inspection(
        checkpoint.path,
        checkpoint.kind,
        tuple(_shown(file, checkpoint) for file in checkpoint.files),
        tensors,
        present,
        found,
        config,
        known,
        (*disagreements(checkpoint.config, quantised), *contradictions(weights, config, known)),
        quick,
        schemes=schemes,
    )


def _role(role: str, found: list[tuple[TensorReport, Evidence]], tables: dict[str, Table]) -> RoleReport:
    tensors = [tensor for tensor, _ in found]
    return RoleReport(
        role,
        len(tensors),
        sum(tensor.numel for tensor in tensors),
        sum(tensor.nbytes for tensor in tensors),
        {dtype: sum(sizes) for dtype, sizes in grouped((t.dtype, t.numel) for t in tensors).items()},
        verdict([said for _, said in found]),
        _together([t.statistics for t in tensors if t.statistics], tables[role]) if role in tables else None,
    )


def _together(parts: list[Statistics], table: Table) -> Statistics:
    """The statistics of several tensors. Subnormals are counted in each tensor's own type; there is no common scale."""
    smallest = min((part.smallest for part in parts if part.nonzero), default=0.0)
    found = of_table(table, max(part.amax for part in parts), smallest)
    return replace(found, subnormal=sum(part.subnormal for part in parts), exact_scaled={})


def _evidence(tensor: TensorReport) -> Evidence:
    counted = tensor.statistics
    return Evidence(
        tensor.dtype,
        tensor.layer.values if tensor.layer else tensor.numel,
        tensor.origin,
        counted.nonzero if counted else 0,
        counted.fp16_subnormal if counted else 0,
        tensor.layer,
        tensor.layer.nbytes if tensor.layer else tensor.nbytes,
        tensor.layer is None and tensor.dtype in _PACKED and len(tensor.shape) > 1,
    )


def _shown(file: Path, checkpoint: Checkpoint) -> str:
    """A file's name, relative to the checkpoint's folder."""
    return str(file.relative_to(checkpoint.path)) if checkpoint.path in file.parents else file.name


def _config_dtype(checkpoint: Checkpoint) -> str | None:
    config = checkpoint.config or {}
    named = config.get("dtype", config.get("torch_dtype"))
    return named.removeprefix("torch.") if isinstance(named, str) else None


def _earlier(seen: dict[tuple[object, ...], StoredTensor], tensor: StoredTensor, found: Scan) -> str | None:
    """The name of the first tensor with the same bytes; None where there is none, or the values are constant.

    Args:
        seen: earlier tensors by their counts: bytes are compared only where all counts are equal.
    """
    if found.distinct < 2:
        return None
    counts = hashlib.sha256(found.table.counts.tobytes()).digest()
    key = (tensor.dtype, tensor.numel, found.table.lowest, found.table.zeros, found.amax, found.smallest, counts)
    first = seen.setdefault(key, tensor)
    return first.name if first is not tensor and same_bytes(Pair(first, tensor)) else None


_FRACTIONS = {"float32": 23, "bfloat16": 7, "float16": 10}


def quick_origin(tensor: Values, progress: Progress | None = None) -> Origin | None:
    """The origin that the OR of all values' bits shows; None for types other than float32, bfloat16 and float16.

    One value with the last bit set shows that the type is used in full, and the rest is not read. That no value has it
    set is not weighed: nothing is counted, so a tensor of a few values looks like one of millions.
    """
    if tensor.dtype not in _FRACTIONS:
        return None
    ored, fraction, left = 0, _FRACTIONS[tensor.dtype], tensor.nbytes
    for chunk in tensor.chunks(CHUNK):
        ored |= kernel.any_bits(chunk, 1 << fraction)
        done = left if ored & 1 else chunk.nbytes
        left -= done
        if progress is not None:
            progress(done)
        if not left:
            break
    used = ored & (1 << fraction) - 1
    bits = fraction + 1 - ((used & -used).bit_length() - 1) if used else 1
    through = _through(bits, fraction + 1)
    return Origin(tensor.dtype, through, full=bits == fraction + 1, telling=tensor.numel if used else 0, counted=False)


def _through(bits: int, most: int) -> tuple[str, ...]:
    return () if bits in (most, 1) else ("bf16",) if bits <= 8 < most else ("fp16",) if bits <= 11 < most else ()
