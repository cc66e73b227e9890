"""Files of torch.save: a zip archive of one pickle and one member per storage; the older format; and DCP's folders.

The pickle is read by the interpreter of `pickles`, which executes nothing. Before version 1.6 a file was three short
pickles, that of the tensors, one of the keys of their storages, then the bytes of the storages. Other files that begin
with a pickle are recognised, and refused: pickle.dump puts the bytes of tensors inside the pickle, so that they cannot
be found without reading all of it. A folder of torch.distributed.checkpoint has one pickle `.metadata`, and files in
which each part is a torch.save. Source: PyTorch, torch/serialization.py, `_save` and `_load`;
torch/distributed/checkpoint/metadata.py and filesystem.py, `_write_item`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halfstep.bits.values import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.files import (
    DIMENSIONS,
    TEXT,
    Checkpoint,
    File,
    Mosaic,
    Placed,
    Plain,
    Reader,
    StoredTensor,
    Strided,
    check_count,
    head,
    inside,
    is_contiguous,
)
from halfstep.inspection.pickles import Allowed, Name, Pairs, Record, load, load_next
from halfstep.inspection.torch_objects import BASIC, TENSORS, Storage, View, passed_over, record, storage, views
from halfstep.inspection.zips import STORED, members


Order = Literal["<", ">"]


@dataclass(frozen=True, slots=True)
class Region:
    """`size` bytes of a file from `start`, in a byte order."""

    file: File
    start: int
    size: int
    order: Order = "<"

    def located(self, name: str, view: View) -> Strided:
        """Where the values of a view of this storage are.

        Raises:
            CheckpointError: the storage's size is not as in the pickle, or too small for the view.
        """
        what, stored = f"{self.file.path}: tensor {name!r}", view.storage
        if self.size != TYPES[stored.dtype].piece.itemsize * stored.numel:
            raise CheckpointError(f"{what}: a storage of {self.size} bytes; expected {stored.numel} of {stored.dtype}")
        dtype = TYPES[view.dtype].piece.newbyteorder(self.order)
        last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        if 0 not in view.shape and (last + 1) * dtype.itemsize > self.size:
            raise CheckpointError(f"{what}: its values reach behind the end of its storage of {self.size} bytes")
        strides = tuple(stride * dtype.itemsize for stride in view.strides)
        return Strided(self.file, self.start + view.offset * dtype.itemsize, view.shape, strides, dtype)

    def tensor(self, name: str, view: View) -> StoredTensor:
        """A tensor of this storage.

        Raises:
            CheckpointError: as `located`.
        """
        place = self.located(name, view)
        count, itemsize = math.prod(view.shape), place.dtype.itemsize
        identity = f"{self.file.path}:{place.start}:{place.start + count * itemsize}"
        source: Plain | Strided = place
        if count == 0 or is_contiguous(view.shape, view.strides):
            source = Plain(self.file, place.start, count, place.dtype)
        else:
            identity += f":{view.shape}:{view.strides}"
        return StoredTensor(name, view.dtype, view.shape, self.file.path, count * itemsize, identity, source)


def opened(path: Path, kind: str, root: object, tensor: Callable[[str, View], StoredTensor]) -> Checkpoint:
    """The checkpoint of the object in a pickle of torch; `tensor` makes one of its tensors, given its dotted name."""
    tensors, arrays = list[StoredTensor](), list[str]()
    for name, view in views(root, str(path), arrays):
        check_count(len(tensors), path)
        tensors.append(tensor(name, view))
    return Checkpoint(path, kind, (path,), tuple(tensors), remarks=passed_over(arrays))


class Archive:
    """The zip archive of torch.save in `length` bytes of a file from `base` (default: the whole file)."""

    def __init__(self, file: File, base: int = 0, length: int | None = None) -> None:
        self.file = file
        self.members = members(file, base, length)
        pickles = [name for name in self.members if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise CheckpointError(
                f"{file.path}: a zip archive with {len(pickles)} members data.pkl; expected torch's one"
            )
        self.prefix = pickles[0].removesuffix("data.pkl")
        self.order = self._order()

    def root(self) -> object:
        """The saved object, made of `torch_objects`."""
        return load(self._small("data.pkl", TEXT), TENSORS, str(self.file.path), storage)

    def region(self, name: str, view: View) -> Region:
        """The storage of a tensor.

        Raises:
            CheckpointError: it is missing, or compressed.
        """
        what = f"{self.file.path}: tensor {name!r}"
        member = self.members.get(f"{self.prefix}data/{view.storage.key}")
        if member is None:
            raise CheckpointError(
                f"{what}: its storage {view.storage.key[:80]!r} is not in the archive; the file is broken"
            )
        if member.method != STORED or member.packed != member.size:
            raise CheckpointError(
                f"{what}: its storage is compressed, which torch never does; save it again with torch"
            )
        return Region(self.file, member.start, member.size, self.order)

    def _small(self, name: str, limit: int) -> bytes:
        member = self.members[self.prefix + name]
        if member.method != STORED or member.packed != member.size or member.size > limit:
            raise CheckpointError(
                f"{self.file.path}: {name} is compressed or has {member.size} bytes; expected at most {limit}, plain"
            )
        return self.file.read(member.start, member.size)

    def _order(self) -> Order:
        if self.prefix + "byteorder" not in self.members:
            return "<"
        found = self._small("byteorder", 16)
        if found not in (b"little", b"big"):
            raise CheckpointError(f"{self.file.path}: byte order {found!r}; expected little or big")
        return "<" if found == b"little" else ">"


def open_torch_zip(path: Path) -> Checkpoint:
    """The tensors of a file of torch.save; nested dictionaries and lists give dotted names.

    Raises:
        CheckpointError: the file is broken, or its pickle refers to anything but tensors.
    """
    archive = Archive(File.of(path))
    return opened(path, "torch zip", archive.root(), lambda name, view: archive.region(name, view).tensor(name, view))


reader = Reader(
    "torch zip",
    lambda path: head(path, 4) == b"PK\3\4" and not any(name.endswith(".npy") for name in members(File.of(path))),
    open_torch_zip,
)


MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # 0x1950a86a20f9469cfc6c

_VERSION = 1001


def open_legacy(path: Path) -> Checkpoint:
    """The tensors of a file of torch.save before 1.6; nested dictionaries and lists give dotted names.

    Raises:
        CheckpointError: the file is broken, or its pickle refers to anything but tensors.
    """
    file = File.of(path)
    data = file.read(0, min(file.size, TEXT))
    found: dict[str, Storage] = {}

    def held(identity: tuple[object, ...]) -> Storage | Name:
        match identity:
            case ("module", Name() as kind, str(), str()):  # a module's class, with its source code
                return kind
        if len(identity) > 5 and identity[5] is not None:
            raise CheckpointError("a storage that is a part of another, as torch before 0.4 wrote; save it again")
        one = storage(identity)
        if found.setdefault(one.key, one) != one:
            raise CheckpointError(f"two storages are called {one.key[:80]!r}; the file is broken")
        return one

    version, at = load_next(data, len(MAGIC), {}, str(path))
    system, at = load_next(data, at, {}, str(path))
    little = system.text_keys().get("little_endian") if isinstance(system, Pairs) else None
    if version != _VERSION or type(little) is not bool:
        raise CheckpointError(f"{path}: version {str(version)[:40]} of torch's old format; expected {_VERSION}")
    root, at = load_next(data, at, TENSORS, str(path), held)
    keys, at = load_next(data, at, {}, str(path))
    regions = _regions(file, at, keys, found, "<" if little else ">")
    return opened(path, legacy.name, root, lambda name, view: regions[view.storage.key].tensor(name, view))


def _regions(file: File, at: int, keys: object, found: dict[str, Storage], order: Order) -> dict[str, Region]:
    """The position of each storage: one after the other, each preceded by the number of its values."""
    if not isinstance(keys, list) or any(type(key) is not str for key in keys) or set(keys) != set(found):
        raise CheckpointError(f"{file.path}: its list of storages is not that of its tensors; the file is broken")
    regions: dict[str, Region] = {}
    with file.opened() as descriptor:
        for key in keys:
            count = int.from_bytes(file.read_from(descriptor, at, 8), "little" if order == "<" else "big")
            if count != found[key].numel or key in regions:
                raise CheckpointError(
                    f"{file.path}: a storage of {count} values; expected {found[key].numel}; the file is broken"
                )
            size = count * TYPES[found[key].dtype].piece.itemsize
            file.within(at + 8, size, f"storage {key[:80]!r}")
            regions[key] = Region(file, at + 8, size, order)
            at += 8 + size
    return regions


def refuse(path: Path) -> Checkpoint:
    """Refuse a bare pickle.

    Raises:
        CheckpointError: always; it says how to save the file in a form that is read.
    """
    raise CheckpointError(
        f"{path}: a bare pickle, as pickle.dump writes; expected a file of torch.save, or safetensors. If you trust "
        "where it comes from: torch.save(torch.load(path, weights_only=True), new_path)"
    )


legacy = Reader("torch legacy", lambda path: head(path, len(MAGIC)) == MAGIC, open_legacy)
bare = Reader(
    "bare pickle",
    lambda path: head(path, 2) in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") and not legacy.recognises(path),
    refuse,
)


_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR, _INDEX = f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.MetadataIndex"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"

_LAYOUT = f"{_METADATA}._MEM_FORMAT_ENCODING"


def _member(args: tuple[Any, ...]) -> Record:
    """getattr(enumeration, member): how Python before 3.11.4 pickles a tensor's memory format; no other getattr."""
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
"""The names that `.metadata` may refer to."""


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
        """Where its values are.

        Raises:
            CheckpointError: the file does not hold the part that the metadata describe.
        """
        archive = Archive(self.file, self.offset, self.length)
        root = archive.root()
        if not isinstance(root, View) or root.shape != self.sizes or root.dtype != self.dtype:
            found = f"{root.dtype} of shape {root.shape}" if isinstance(root, View) else "no tensor"
            raise CheckpointError(
                f"{self.file.path}: byte {self.offset} holds {found}; expected {self.dtype} of shape {self.sizes}, "
                f"a part of {self.name!r}"
            )
        return archive.region(self.name, root).located(self.name, root)


class _Folder:
    """The records of one `.metadata`, and the files that it names."""

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
        """The entries that are tensors; the others hold pickled values, which are not read."""
        found = [(name, each) for name, each in self.entries if isinstance(each, Record) and each.name == _TENSOR]
        check_count(len(found), self.what)
        return [self.tensor(name, self.state(each, _TENSOR)) for name, each in found]

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
    # Text, whose hash cannot be predicted: many keys with one hash would take hours to store.
    return f"{name}@{offsets}"


def open_dcp(path: Path) -> Checkpoint:
    """The tensors of a folder of torch.distributed.checkpoint, each assembled from its parts when it is read.

    Raises:
        CheckpointError: the metadata are broken or refer to anything but tensors, or a file is missing.
    """
    folder = _Folder(path)
    return Checkpoint(path, dcp.name, tuple(file.path for file in folder.files.values()), tuple(folder.tensors()))


dcp = Reader("torch DCP", lambda path: (path / ".metadata").is_file(), open_dcp)
