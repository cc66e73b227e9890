"""Files of torch.save before version 1.6; other files that begin with a pickle are known, and refused.

Three short pickles, that of the tensors, one of the keys of their storages, then the bytes of the storages. A file of
pickle.dump has the bytes of tensors inside the pickle, so that they cannot be found without reading all of it.
"""

from pathlib import Path

from halfstep.bits.values import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.files import TEXT, Checkpoint, File, Reader, head
from halfstep.inspection.pickles import Name, Pairs, load_next
from halfstep.inspection.readers.torch_zip import Order, Region, opened
from halfstep.inspection.torch_objects import TENSORS, Storage, storage


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
    return opened(path, reader.name, root, lambda name, view: regions[view.storage.key].tensor(name, view))


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


reader = Reader("torch legacy", lambda path: head(path, len(MAGIC)) == MAGIC, open_legacy)
bare = Reader("bare pickle", lambda path: head(path, 2) in _PROTOCOLS and not reader.recognises(path), refuse)
