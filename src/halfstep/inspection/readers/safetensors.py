"""The safetensors format: 8 bytes of length, a JSON header, then the tensors' bytes without gaps; also sharded.

Several files have an index, a `model.safetensors.index.json` or a `pytorch_model.bin.index.json`, or are in a folder as
Hugging Face has them: config.json, and weights.

Source: https://github.com/huggingface/safetensors, README, "Format"; Hugging Face, transformers, "Sharded checkpoints".
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfstep.bits.values import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.files import (
    DIMENSIONS,
    TEXT,
    Checkpoint,
    File,
    Plain,
    Reader,
    StoredTensor,
    check_count,
    head,
    inside,
    parse_object,
)
from halfstep.inspection.readers import torch_zip


DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn", "F4": "float4_e2m1fn",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


def open_safetensors(path: Path) -> Checkpoint:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: the header is invalid, or contradicts the file's size.
    """
    file = File.of(path)
    length = _header_length(file)
    header = parse_object(file.read(8, length), f"{path}: the header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a map of strings, which is what safetensors writes there")
    check_count(len(header), path)
    tensors = tuple(_tensor(file, 8 + length, name, entry) for name, entry in header.items())
    _check_cover(file, 8 + length, header)
    return Checkpoint(path, "safetensors", (path,), tensors, metadata)


def _recognises(path: Path) -> bool:
    # The format has no magic number: a file of another name is known by a header of a likely length.
    start = head(path, 9)
    likely = start[8:] == b"{" and int.from_bytes(start[:8], "little") <= TEXT
    return likely or (path.suffix == ".safetensors" and path.is_file())


def _header_length(file: File) -> int:
    if file.size < 8:
        raise CheckpointError(f"{file.path}: {file.size} bytes; expected a safetensors file, which has 8 and a header")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > TEXT:
        raise CheckpointError(f"{file.path}: a header of {length} bytes; expected at most {TEXT}")
    file.within(8, length, "the header")
    return length


def _tensor(file: File, start: int, name: str, entry: Any) -> StoredTensor:
    """The tensor of one entry of the header.

    The product of a shape is of Python's integers, so that no size overflows; it must equal the entry's bytes.
    """
    what = f"{file.path}: tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what} is described by {str(entry)[:80]!r}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{what} is of type {str(dtype)[:80]!r}; expected one of {', '.join(DTYPES)}")
    if not _are_integers(shape, DIMENSIONS) or not _are_integers(offsets, 2) or len(offsets) != 2:
        raise CheckpointError(
            f"{what}: shape {str(shape)[:80]} and data_offsets {str(offsets)[:80]}; expected lists of integers"
        )
    kind, (low, high) = TYPES[DTYPES[dtype]], offsets
    if high - low != kind.nbytes(tuple(shape)):
        raise CheckpointError(
            f"{what}: {high - low} bytes for {dtype} of shape {str(shape)[:80]}; expected {kind.nbytes(tuple(shape))}"
        )
    file.within(start + low, high - low, f"tensor {name!r}")
    source = Plain(file, start + low, (high - low) // kind.piece.itemsize, kind.piece)
    return StoredTensor(name, kind.name, tuple(shape), file.path, high - low, f"{file.path}:{low}:{high}", source)


def _are_integers(found: Any, most: int) -> bool:
    return isinstance(found, list) and len(found) <= most and all(type(n) is int and 0 <= n < 1 << 63 for n in found)


def _check_cover(file: File, start: int, header: dict[str, Any]) -> None:
    """Check that the tensors' bytes fill the file: no overlap, no gap, nothing after the last one."""
    end = 0
    for (low, high), name in sorted((entry["data_offsets"], name) for name, entry in header.items()):
        if low != end:
            wrong = "overlaps the tensor before it" if low < end else "leaves a gap before it"
            raise CheckpointError(f"{file.path}: tensor {name!r} {wrong}; a safetensors file has neither")
        end = high
    if start + end != file.size:
        raise CheckpointError(
            f"{file.path}: {file.size - start - end} bytes behind the last tensor; expected the file to end there"
        )


reader = Reader("safetensors", _recognises, open_safetensors)


SHARDS = (reader, torch_zip.reader, torch_zip.legacy, torch_zip.bare)
"""The readers of single files of an index or a folder."""


def open_index(path: Path) -> Checkpoint:
    """The tensors that an index names, from the files that it names, which must be in its folder.

    Raises:
        CheckpointError: the index is broken, a file is missing or outside, or a file lacks a tensor.
    """
    said = read_json(path)
    listed = said.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(
            f"{path}: found no weight_map of names to files; expected an index of a sharded checkpoint"
        )
    check_count(len(listed), path)
    shards = [inside(path.parent, name, str(path)) for name in sorted(set(listed.values()))]
    wanted = {name: path.parent / file for name, file in listed.items()}
    joined = join(path, index.name, shards)
    tensors = tuple(tensor for tensor in joined.tensors if wanted.get(tensor.name) == tensor.file)
    if len(tensors) < len(wanted):
        missing = next(iter(wanted.keys() - {tensor.name for tensor in tensors}))
        raise CheckpointError(f"{path}: tensor {missing!r} is not in {wanted[missing].name!r}; fetch the file again")
    extra = len(joined.tensors) - len(tensors)
    notes = {"tensors that the index does not name": str(extra)} if extra else {}
    return replace(joined, tensors=tensors, metadata={**joined.metadata, **_strings(said), **notes})


def join(path: Path, kind: str, files: Iterable[Path], refuse: bool = True) -> Checkpoint:
    """The tensors of several files as one checkpoint. Without `refuse`, a file that cannot be read becomes a remark, if
    others can be read."""
    tensors: list[StoredTensor] = []
    metadata: dict[str, str] = {}
    opened, remarks = list[Path](), list[str]()
    for file in files:
        try:
            shard = open_shard(file)
        except CheckpointError as error:
            if refuse:
                raise
            remarks.append(f"not read: {error}")
            continue
        opened.append(file)
        tensors += shard.tensors
        remarks += shard.remarks
        check_count(len(tensors), path)
        metadata.update(shard.metadata)
    if not opened and remarks:
        raise CheckpointError(remarks[0].removeprefix("not read: "))
    return Checkpoint(path, kind, tuple(opened), tuple(tensors), metadata, remarks=tuple(remarks))


def open_shard(path: Path) -> Checkpoint:
    """One file of weights.

    Raises:
        CheckpointError: it is neither a safetensors file nor one of torch.save, or is broken.
    """
    for shard in SHARDS:
        if shard.recognises(path):
            return shard.open(path)
    raise CheckpointError(f"{path} is neither a safetensors file nor one of torch.save; fetch it again")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of bounded size.

    Raises:
        CheckpointError: it is longer than the limit, or is not a JSON object.
    """
    file = File.of(path)
    if file.size > TEXT:
        raise CheckpointError(f"{path} has {file.size} bytes; expected at most {TEXT}")
    return parse_object(file.read(0, file.size), str(path))


def _strings(said: dict[str, Any]) -> dict[str, str]:
    found = said.get("metadata")
    return {
        key: str(value)
        for key, value in (found.items() if isinstance(found, dict) else ())
        if isinstance(value, str | float) or (type(value) is int and abs(value) < 1 << 64)
    }


index = Reader("sharded index", lambda path: path.is_file() and path.name.endswith(".index.json"), open_index)


PREFERRED = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
"""The files from which transformers loads weights, in its order."""

_ENDINGS = (".safetensors", ".bin")

_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin", "scaler.bin")
"""Files that trainers of transformers and accelerate leave beside weights."""


def open_folder(path: Path) -> Checkpoint:
    """The weights of a folder: the file that transformers would load, else all safetensors files, else all of torch.

    Raises:
        CheckpointError: there are no weights, or they are broken.
    """
    return replace(
        _weights(path),
        path=path,
        kind=hugging_face.name,
        config=read_json(inside(path, "config.json", str(path))) if (path / "config.json").exists() else None,
    )


def _weights(path: Path) -> Checkpoint:
    for name in PREFERRED:
        if (path / name).exists():
            found = inside(path, name, str(path))
            return open_index(found) if name.endswith(".json") else join(path, hugging_face.name, [found])
    for ending in _ENDINGS:
        if names := _named(path, ending):
            return join(
                path, hugging_face.name, [inside(path, name, str(path)) for name in names], refuse=len(names) == 1
            )
    raise CheckpointError(
        f"{path}: a config.json without weights; expected one of {', '.join(PREFERRED)}, or files that end in "
        f"{' or '.join(_ENDINGS)}. If the repository was cloned, fetch the large files: git lfs pull"
    )


def _named(path: Path, ending: str) -> list[str]:
    return sorted(
        name for name in (file.name for file in path.iterdir()) if name.endswith(ending) and name not in _NO_WEIGHTS
    )


def _is_folder(path: Path) -> bool:
    if not path.is_dir() or (path / ".metadata").exists():
        return False
    return any((path / name).exists() for name in ("config.json", *PREFERRED)) or any(
        _named(path, ending) for ending in _ENDINGS
    )


hugging_face = Reader("Hugging Face folder", _is_folder, open_folder)
