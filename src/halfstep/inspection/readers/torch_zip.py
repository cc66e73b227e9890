"""Files that torch.save writes: a zip archive of one pickle and one member for each storage; and older ones.

The pickle goes through the machine of `pickles`, which runs nothing. Before version 1.6 a file was three short pickles,
that of the tensors, one of the keys of their storages, then the bytes of the storages. Other files that begin with a
pickle are known, and refused: one of pickle.dump has the bytes of tensors inside the pickle, so that they cannot be
found without reading all of it.
Source: PyTorch, torch/serialization.py, `_save` and `_load`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halfstep.bits.values import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.files import TEXT, Checkpoint, File, Reader, StoredTensor, check_count, head
from halfstep.inspection.layout import Plain, Strided, is_contiguous
from halfstep.inspection.pickles import Name, Pairs, load, load_next
from halfstep.inspection.torch_objects import TENSORS, Storage, View, passed_over, storage, views
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
        """Where the values of a view of this storage lie.

        Raises:
            CheckpointError: the storage is not as long as the pickle says, or too small for the view.
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
    """The checkpoint of what a pickle of torch describes; `tensor` makes one of its tensors, by its dotted name."""
    tensors, arrays = list[StoredTensor](), list[str]()
    for name, view in views(root, str(path), arrays):
        check_count(len(tensors), path)
        tensors.append(tensor(name, view))
    return Checkpoint(path, kind, (path,), tuple(tensors), remarks=passed_over(arrays))


class Archive:
    """The zip archive of torch.save in `length` bytes of a file from `base`, by default all of it."""

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
        """The object that was saved, as `torch_objects` describes it."""
        data = self._small("data.pkl", TEXT)
        return load(data, TENSORS, str(self.file.path), storage)

    def tensor(self, name: str, view: View) -> StoredTensor:
        """A tensor of the archive.

        Raises:
            CheckpointError: its storage is not there, is compressed, or too small.
        """
        return self._storage(name, view).tensor(name, view)

    def located(self, name: str, view: View) -> Strided:
        """Where the values of a tensor lie.

        Raises:
            CheckpointError: as `tensor`.
        """
        return self._storage(name, view).located(name, view)

    def _storage(self, name: str, view: View) -> Region:
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
    """The tensors of a file of torch.save, nested dictionaries and lists by dotted names.

    Raises:
        CheckpointError: the file is broken, or its pickle refers to anything but tensors.
    """
    archive = Archive(File.of(path))
    return opened(path, "torch zip", archive.root(), archive.tensor)


reader = Reader(
    "torch zip",
    lambda path: head(path, 4) == b"PK\3\4" and not any(name.endswith(".npy") for name in members(File.of(path))),
    open_torch_zip,
)


MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # 0x1950a86a20f9469cfc6c

_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_VERSION = 1001


def open_legacy(path: Path) -> Checkpoint:
    """The tensors of such a file, nested dictionaries and lists by dotted names.

    Raises:
        CheckpointError: the file is broken, or its pickle refers to anything but tensors.
    """
    file = File.of(path)
    data = file.read(0, min(file.size, TEXT))
    found: dict[str, Storage] = {}

    def held(identity: tuple[object, ...]) -> Storage | Name:
        match identity:
            case ("module", Name() as kind, str(), str()):  # with its source, which means nothing here
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
    """Where each storage lies: one after the other, each behind the number of its values."""
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
    """Nothing.

    Raises:
        CheckpointError: always; it says how to save the file in a form that is read.
    """
    raise CheckpointError(
        f"{path}: a bare pickle, as pickle.dump writes; expected a file of torch.save, or safetensors. If you trust "
        "where it comes from: torch.save(torch.load(path, weights_only=True), new_path)"
    )


legacy = Reader("torch legacy", lambda path: head(path, len(MAGIC)) == MAGIC, open_legacy)
bare = Reader("bare pickle", lambda path: head(path, 2) in _PROTOCOLS and not legacy.recognises(path), refuse)
