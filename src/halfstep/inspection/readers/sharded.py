"""Checkpoints in several files with an index, and folders as Hugging Face has them: config.json, and weights.

An index is a `model.safetensors.index.json`, or a `pytorch_model.bin.index.json`.

Source: Hugging Face, transformers, "Sharded checkpoints".
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfstep.errors import CheckpointError
from halfstep.inspection.files import TEXT, Checkpoint, File, Reader, StoredTensor, check_count, inside, parse_object
from halfstep.inspection.readers import safetensors, torch_zip


SHARDS = (safetensors.reader, torch_zip.reader, torch_zip.legacy, torch_zip.bare)
"""The readers of the files that an index or a folder may be made of."""


def open_index(path: Path) -> Checkpoint:
    """The tensors that an index names, from the files it names, which must lie in its folder.

    Raises:
        CheckpointError: the index is broken, a file is missing or outside, or a file lacks a tensor.
    """
    index = read_json(path)
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(
            f"{path}: found no weight_map of names to files; expected an index of a sharded checkpoint"
        )
    check_count(len(listed), path)
    shards = [inside(path.parent, name, str(path)) for name in sorted(set(listed.values()))]
    wanted = {name: path.parent / file for name, file in listed.items()}
    joined = join(path, reader.name, shards)
    tensors = tuple(tensor for tensor in joined.tensors if wanted.get(tensor.name) == tensor.file)
    if len(tensors) < len(wanted):
        missing = next(iter(wanted.keys() - {tensor.name for tensor in tensors}))
        raise CheckpointError(f"{path}: tensor {missing!r} is not in {wanted[missing].name!r}; fetch the file again")
    extra = len(joined.tensors) - len(tensors)
    notes = {"tensors that the index does not name": str(extra)} if extra else {}
    return replace(joined, tensors=tensors, metadata={**joined.metadata, **_strings(index), **notes})


def join(path: Path, kind: str, files: Iterable[Path], refuse: bool = True) -> Checkpoint:
    """The tensors of several files as one checkpoint. Without `refuse` a file that cannot be read is a remark, as long
    as others can be.
    """
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


def _strings(index: dict[str, Any]) -> dict[str, str]:
    found = index.get("metadata")
    return {
        key: str(value)
        for key, value in (found.items() if isinstance(found, dict) else ())
        if isinstance(value, str | float) or (type(value) is int and abs(value) < 1 << 64)
    }


reader = Reader("sharded index", lambda path: path.is_file() and path.name.endswith(".index.json"), open_index)


PREFERRED = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
"""Where transformers looks for weights, in its order."""

_ENDINGS = (".safetensors", ".bin")

_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin", "scaler.bin")
"""What trainers of transformers and accelerate leave beside weights."""


def open_folder(path: Path) -> Checkpoint:
    """The weights of a folder: the file that transformers would load, else all safetensors files, else all of torch.

    Raises:
        CheckpointError: there are no weights, or they are broken.
    """
    config = read_json(inside(path, "config.json", str(path))) if (path / "config.json").exists() else None
    return replace(_weights(path), path=path, kind=hugging_face.name, config=config)


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
    names = (file.name for file in path.iterdir())
    return sorted(name for name in names if name.endswith(ending) and name not in _NO_WEIGHTS)


def _recognises(path: Path) -> bool:
    if not path.is_dir() or (path / ".metadata").exists():
        return False
    named = any((path / name).exists() for name in ("config.json", *PREFERRED))
    return named or any(_named(path, ending) for ending in _ENDINGS)


hugging_face = Reader("Hugging Face folder", _recognises, open_folder)
