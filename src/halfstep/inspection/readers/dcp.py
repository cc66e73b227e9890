"""Folders of torch.distributed.checkpoint: one pickle `.metadata`, and files in which each part is a torch.save.

Source: PyTorch, torch/distributed/checkpoint/metadata.py and filesystem.py, `_write_item`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.bits.values import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.files import DIMENSIONS, TEXT, Checkpoint, File, Reader, StoredTensor, check_count, inside
from halfstep.inspection.layout import Mosaic, Placed, Strided
from halfstep.inspection.pickles import Allowed, Name, Pairs, Record, load
from halfstep.inspection.readers.torch_zip import Archive
from halfstep.inspection.torch_objects import BASIC, View, record


_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR, _INDEX = f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.MetadataIndex"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"

_LAYOUT = f"{_METADATA}._MEM_FORMAT_ENCODING"


def _member(args: tuple[Any, ...]) -> Record:
    """getattr(enumeration, member): how Python before 3.11.4 pickles a tensor's memory format. Nothing else of it."""
    match args:
        case (Name(name=kind), str() as member) if kind == _LAYOUT:
            return Record(kind, (member,))
    raise CheckpointError("getattr of something other than a memory format, which torch does not write; it was not run")


ALLOWED: Allowed = {
    **BASIC,
    **record(_TENSOR),
    **record(_INDEX),
    **record(_INFO),
    **record(f"{_METADATA}.Metadata"),
    **record(f"{_METADATA}.BytesStorageMetadata"),
    **record(f"{_METADATA}.ChunkStorageMetadata"),
    **record(f"{_METADATA}.TensorProperties"),
    **record(f"{_METADATA}.StorageMeta"),
    **record(_LAYOUT),
    "builtins.getattr": _member,
    **record("pathlib.PosixPath"),
    **record("pathlib.WindowsPath"),
    **record("pathlib._local.PosixPath"),  # as Python 3.13 names them
    **record("pathlib._local.WindowsPath"),
}
"""What `.metadata` may refer to."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a tensor: a torch.save of `sizes` values in `length` bytes of a file."""

    file: File
    offset: int
    length: int
    name: str
    dtype: str
    sizes: tuple[int, ...]

    def located(self) -> Strided:
        """Where its values lie.

        Raises:
            CheckpointError: what is saved there is not the part that the metadata describe.
        """
        archive = Archive(self.file, self.offset, self.length)
        root = archive.root()
        if not isinstance(root, View) or root.shape != self.sizes or root.dtype != self.dtype:
            found = f"{root.dtype} of shape {root.shape}" if isinstance(root, View) else "no tensor"
            raise CheckpointError(
                f"{self.file.path}: byte {self.offset} holds {found}; expected {self.dtype} of shape {self.sizes}, "
                f"a part of {self.name!r}"
            )
        return archive.located(self.name, root)


class _Folder:
    """The records of one `.metadata`, and the files it names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.what = folder, str(folder / ".metadata")
        file = File.of(inside(folder, ".metadata", str(folder)))
        if file.size > TEXT:
            raise CheckpointError(f"{self.what} has {file.size} bytes; expected at most {TEXT}")
        state = self.state(load(file.read(0, file.size), ALLOWED, self.what), f"{_METADATA}.Metadata")
        self.entries: list[tuple[Any, Any]] = self.pairs(state.get("state_dict_metadata")).items
        self.stored = dict(self.places(self.pairs(state.get("storage_data")).items))
        self.files: dict[str, File] = {}

    def tensors(self) -> list[StoredTensor]:
        """Those of the entries that are tensors; the others hold pickled values, which are not read."""
        found: list[StoredTensor] = []
        for name, entry in self.entries:
            if isinstance(entry, Record) and entry.name == _TENSOR:
                check_count(len(found), self.what)
                found.append(self.tensor(name, self.state(entry, _TENSOR)))
        return found

    def tensor(self, name: Any, state: dict[str, Any]) -> StoredTensor:
        match state:
            case {"properties": Record() as properties, "size": tuple() as shape, "chunks": list() as chunks}:
                dtype = self.dtype(properties)
            case _:
                raise self.odd(f"an entry {str(name)[:80]!r}")
        if type(name) is not str or not chunks:
            raise self.odd(f"an entry {str(name)[:80]!r}")
        self.check_numbers(shape)
        parts = tuple(self.part(name, dtype, shape, chunk) for chunk in chunks)
        kind = TYPES[dtype]
        if sum(math.prod(part.sizes) for part in parts) != math.prod(shape):
            raise CheckpointError(f"{self.what}: the parts of {name!r} do not add up to its shape {shape}")
        source = Mosaic(name, shape, kind.piece, parts)
        first = parts[0].part
        assert isinstance(first, Shard)
        return StoredTensor(
            name, dtype, shape, first.file.path, kind.nbytes(shape), f"{first.file.path}:{first.offset}", source
        )

    def dtype(self, properties: Record) -> str:
        match properties.state:
            case (Name() as dtype, *_) if dtype.name.removeprefix("torch.") in TYPES:
                return dtype.name.removeprefix("torch.")
        raise self.odd("the type of a tensor")

    def part(self, name: str, dtype: str, shape: tuple[int, ...], chunk: Any) -> Placed:
        match self.state(chunk, f"{_METADATA}.ChunkStorageMetadata"):
            case {"offsets": tuple() as offsets, "sizes": tuple() as sizes} if len(offsets) == len(sizes) == len(shape):
                self.check_numbers((*offsets, *sizes))
            case _:
                raise self.odd(f"a part of {name!r}")
        if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise CheckpointError(f"{self.what}: a part of {name!r} reaches out of its shape {shape}")
        info = self.stored.get(_key(name, offsets))
        if info is None:
            raise CheckpointError(f"{self.what}: the part of {name!r} at {offsets} is stored nowhere")
        return Placed(offsets, sizes, self.shard(name, dtype, sizes, info))

    def shard(self, name: str, dtype: str, sizes: tuple[int, ...], info: Record) -> Shard:
        match self.state(info, _INFO):
            case {"transform_descriptors": list() | tuple() as transforms} if transforms:
                raise CheckpointError(
                    f"{self.what}: {name!r} is compressed by {transforms}; save it without extensions"
                )
            case {"relative_path": str() as path, "offset": int() as offset, "length": int() as length}:
                self.check_numbers((offset, length))
            case _:
                raise self.odd(f"the place of {name!r}")
        if path not in self.files:
            self.files[path] = File.of(inside(self.folder, path, self.what))
        self.files[path].within(offset, length, f"a part of {name!r}")
        return Shard(self.files[path], offset, length, name, dtype, sizes)

    def places(self, items: list[tuple[Any, Any]]) -> Iterator[tuple[str, Record]]:
        for index, info in items:
            match self.state(index, _INDEX):
                case {"fqn": str() as name, "offset": tuple() as offsets} if isinstance(info, Record):
                    self.check_numbers(offsets)
                    yield _key(name, offsets), info

    def state(self, found: Any, name: str) -> dict[str, Any]:
        if isinstance(found, Record) and found.name == name and isinstance(found.state, Pairs):
            return found.state.text_keys()
        raise self.odd(f"what should be {name}")

    def pairs(self, found: Any) -> Pairs:
        if isinstance(found, Pairs):
            return found
        raise self.odd("what should be a dictionary")

    def check_numbers(self, numbers: tuple[Any, ...]) -> None:
        if len(numbers) > 2 * DIMENSIONS or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
            raise self.odd("a shape, offset or length")

    def odd(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.what}: {what} is not what torch writes there; the file is broken")


def _key(name: str, offsets: tuple[int, ...]) -> str:
    # Text, whose hash cannot be foreseen: many keys of one hash would take hours to store.
    return f"{name}@{offsets}"


def open_dcp(path: Path) -> Checkpoint:
    """The tensors of a folder of torch.distributed.checkpoint, each put together from its parts when it is read.

    Raises:
        CheckpointError: the metadata are broken or refer to anything but tensors, or a file is missing.
    """
    folder = _Folder(path)
    tensors = tuple(folder.tensors())
    return Checkpoint(path, "torch DCP", tuple(file.path for file in folder.files.values()), tensors)


reader = Reader("torch DCP", lambda path: (path / ".metadata").is_file(), open_dcp)
