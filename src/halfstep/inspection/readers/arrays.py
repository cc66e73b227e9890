"""numpy's files: one array in `.npy`, several in the zip archive `.npz`; never arrays of Python objects.

Source: numpy, numpy/lib/_format_impl.py, "Format Version 1.0" to "3.0".
"""

import ast
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.bits.values import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.files import (
    DIMENSIONS,
    Checkpoint,
    File,
    Plain,
    Reader,
    Source,
    StoredTensor,
    Strided,
    head,
    native,
    row_major,
)
from halfstep.inspection.zips import DEFLATED, STORED, Member, members


MAGIC = b"\x93NUMPY"

DTYPES = {
    "b1": "bool", "i1": "int8", "u1": "uint8", "i2": "int16", "u2": "uint16", "i4": "int32", "u4": "uint32",
    "i8": "int64", "u8": "uint64", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64",
    "c16": "complex128",
}  # fmt: skip

_HEADER = 10_000  # bytes of the longest header, as in numpy.load


@dataclass(frozen=True, slots=True)
class Deflated:
    """`count` values in the compressed bytes of `member`, after a header of `skip` bytes."""

    file: File
    member: Member
    skip: int
    count: int
    dtype: np.dtype

    def pieces(self, nbytes: int) -> Iterator[np.ndarray]:
        """The values in order, unpacked as they are requested."""
        step = max(nbytes // self.dtype.itemsize, 1) * self.dtype.itemsize
        left = self.count * self.dtype.itemsize
        with self.file.opened() as descriptor:
            stream = _Inflated(self.file, descriptor, self.member)
            stream.take(self.skip)
            while left:
                piece = stream.take(min(step, left))
                left -= len(piece)
                yield native(np.frombuffer(piece, self.dtype))
            if not stream.at_end():
                raise CheckpointError(f"{self.file.path}: member {self.member.name!r} is longer than its array")


class _Inflated:
    """A stream of the unpacked bytes of a member."""

    def __init__(self, file: File, descriptor: int, member: Member) -> None:
        self.file, self.descriptor, self.member = file, descriptor, member
        self.at = 0
        self.machine = zlib.decompressobj(-zlib.MAX_WBITS)

    def take(self, count: int) -> bytes:
        """The next `count` bytes.

        Raises:
            CheckpointError: there are fewer, or the compressed data are broken.
        """
        found = bytearray()
        while len(found) < count:
            piece = self._more(count - len(found))
            if not piece and (self.machine.eof or self.at == self.member.packed):
                raise CheckpointError(f"{self.file.path}: member {self.member.name!r} ends early; copy the file again")
            found += piece
        return bytes(found)

    def at_end(self) -> bool:
        """Whether the stream is at its end."""
        return not self._more(1) and (self.machine.eof or self.at == self.member.packed)

    def _more(self, limit: int) -> bytes:
        packed = self.machine.unconsumed_tail
        if not packed and self.at < self.member.packed:
            packed = self.file.read_from(
                self.descriptor, self.member.start + self.at, min(1 << 16, self.member.packed - self.at)
            )
            self.at += len(packed)
        try:
            return self.machine.decompress(packed, limit)
        except zlib.error as error:
            raise CheckpointError(f"{self.file.path}: member {self.member.name!r} is broken: {error}") from error


def open_npy(path: Path) -> Checkpoint:
    """The array of a `.npy` file, with the file's name.

    Raises:
        CheckpointError: it is broken, or contains Python objects.
    """
    file = File.of(path)
    tensor = _tensor(file, Member(path.stem, 0, file.size, file.size, STORED), path.stem)
    return Checkpoint(path, npy.name, (path,), (tensor,))


def open_npz(path: Path) -> Checkpoint:
    """The arrays of a `.npz` file by name.

    Raises:
        CheckpointError: it is broken, or contains Python objects.
    """
    file = File.of(path)
    arrays = [member for name, member in members(file).items() if name.endswith(".npy")]
    tensors = tuple(_tensor(file, member, member.name.removesuffix(".npy")) for member in arrays)
    return Checkpoint(path, npz.name, (path,), tensors)


def _tensor(file: File, member: Member, name: str) -> StoredTensor:
    what = f"{file.path}: array {name!r}"
    skip, header = _header(_start(file, member), what)
    shape, dtype = header["shape"], header["descr"]
    if not isinstance(shape, tuple) or len(shape) > DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise CheckpointError(f"{what}: a shape of {str(shape)[:80]}; expected integers")
    if not isinstance(dtype, str) or dtype[1:] not in DTYPES or dtype[0] not in "<>|":
        objects = " Python objects, which can run code when they are loaded, or" if "O" in str(dtype) else ""
        raise CheckpointError(
            f"{what} holds{objects} values of type {str(dtype)[:80]!r}; expected numbers: save them so"
        )
    kind = TYPES[DTYPES[dtype[1:]]]
    count, nbytes = math.prod(shape), kind.nbytes(shape)
    if member.size != skip + nbytes:
        raise CheckpointError(f"{what}: {member.size - skip} bytes for {dtype} of shape {shape}; expected {nbytes}")
    piece = kind.piece.newbyteorder(">" if dtype[0] == ">" else "<")
    identity = f"{file.path}:{member.start}"
    source: Source
    if member.method == STORED:
        start = member.start + skip
        source = Plain(file, start, count, piece)
        if header["fortran_order"] and len(shape) > 1:
            strides = tuple(stride * piece.itemsize for stride in row_major(shape[::-1])[::-1])
            source = Strided(file, start, shape, strides, piece)
    elif header["fortran_order"] and len(shape) > 1:
        raise CheckpointError(f"{what} is compressed column by column; save it in C order, or with numpy.savez")
    else:
        source = Deflated(file, member, skip, count, piece)
    return StoredTensor(name, kind.name, shape, file.path, nbytes, identity, source)


def _start(file: File, member: Member) -> bytes:
    """The first bytes of a member, unpacked, enough for a header."""
    if member.method == DEFLATED:
        with file.opened() as descriptor:
            return _Inflated(file, descriptor, member).take(min(member.size, _HEADER + 12))
    if member.method != STORED or member.packed != member.size:
        raise CheckpointError(f"{file.path}: member {member.name!r} is packed in a way that numpy does not write")
    return file.read(member.start, min(member.size, _HEADER + 12))


def _header(data: bytes, what: str) -> tuple[int, dict[str, Any]]:
    """The number of bytes up to the end of the header, and the header."""
    if data[:6] != MAGIC or len(data) < 12 or data[6] not in (1, 2, 3):
        raise CheckpointError(f"{what} does not begin as numpy's arrays do")
    width = 2 if data[6] == 1 else 4
    length = int.from_bytes(data[8 : 8 + width], "little")
    text = data[8 + width : 8 + width + length]
    if length > _HEADER or len(text) != length:
        raise CheckpointError(
            f"{what}: a header of {length} bytes; expected at most {_HEADER}, and that the file has them"
        )
    try:
        header = ast.literal_eval(text.decode("utf-8" if data[6] == 3 else "latin1").strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{what}: its header does not describe an array: {error}") from error
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise CheckpointError(f"{what}: its header describes {str(header)[:80]}; expected type, order and shape")
    return 8 + width + length, header


npy = Reader("numpy array", lambda path: head(path, 6) == MAGIC, open_npy)
npz = Reader(
    "numpy archive",
    lambda path: head(path, 4) == b"PK\3\4" and any(name.endswith(".npy") for name in members(File.of(path))),
    open_npz,
)
