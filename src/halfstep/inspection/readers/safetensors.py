"""The safetensors format: 8 bytes of length, a JSON header, then the tensors' bytes without gaps.

Source: https://github.com/huggingface/safetensors, README, "Format".
"""

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
    parse_object,
)


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
        CheckpointError: the header is not one, or disagrees with the file's size.
    """
    file = File.of(path)
    length = _header_length(file)
    header = parse_object(file.read(8, length), f"{path}: the header")
    metadata = _metadata(header.pop("__metadata__", {}), path)
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


def _metadata(found: Any, path: Path) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a map of strings, which is what safetensors writes there")
    return found


def _tensor(file: File, start: int, name: str, entry: Any) -> StoredTensor:
    """One entry of the header.

    The product of a shape is of Python's integers, so that no size overflows; it must equal the entry's bytes.
    """
    what = f"{file.path}: tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what} is described by {str(entry)[:80]!r}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{what} is of type {str(dtype)[:80]!r}; expected one of {', '.join(DTYPES)}")
    if not _whole_numbers(shape, DIMENSIONS) or not _whole_numbers(offsets, 2) or len(offsets) != 2:
        raise CheckpointError(
            f"{what}: shape {str(shape)[:80]} and data_offsets {str(offsets)[:80]}; expected lists of whole numbers"
        )
    kind, (low, high) = TYPES[DTYPES[dtype]], offsets
    if high - low != kind.nbytes(tuple(shape)):
        raise CheckpointError(
            f"{what}: {high - low} bytes for {dtype} of shape {str(shape)[:80]}; expected {kind.nbytes(tuple(shape))}"
        )
    file.within(start + low, high - low, f"tensor {name!r}")
    source = Plain(file, start + low, (high - low) // kind.piece.itemsize, kind.piece)
    return StoredTensor(name, kind.name, tuple(shape), file.path, high - low, f"{file.path}:{low}:{high}", source)


def _whole_numbers(found: Any, most: int) -> bool:
    return isinstance(found, list) and len(found) <= most and all(type(n) is int and 0 <= n < 1 << 63 for n in found)


def _check_cover(file: File, start: int, header: dict[str, Any]) -> None:
    """The tensors' bytes follow one another to the end of the file: no overlap, no gap, nothing hidden behind."""
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
