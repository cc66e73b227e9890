"""Folders as Hugging Face has them: config.json, and weights in one file or in several with an index."""

from dataclasses import replace
from pathlib import Path

from halfstep.errors import CheckpointError
from halfstep.inspection.files import Checkpoint, Reader, inside
from halfstep.inspection.readers.sharded import join, open_index, read_json


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
    return replace(_weights(path), path=path, kind=reader.name, config=config)


def _weights(path: Path) -> Checkpoint:
    for name in PREFERRED:
        if (path / name).exists():
            found = inside(path, name, str(path))
            return open_index(found) if name.endswith(".json") else join(path, reader.name, [found])
    for ending in _ENDINGS:
        if names := _named(path, ending):
            return join(path, reader.name, [inside(path, name, str(path)) for name in names], refuse=len(names) == 1)
    raise CheckpointError(
        f"{path}: a config.json without weights; expected one of {', '.join(PREFERRED)}, or files that end in "
        f"{' or '.join(_ENDINGS)}. If the repository was cloned, fetch the large files: git lfs pull"
    )


def _named(path: Path, ending: str) -> list[str]:
    names = (file.name for file in path.iterdir() if file.name.endswith(ending))
    return sorted(name for name in names if name not in _NO_WEIGHTS)


def _recognises(path: Path) -> bool:
    if not path.is_dir() or (path / ".metadata").exists():
        return False
    named = any((path / name).exists() for name in ("config.json", *PREFERRED))
    return named or any(_named(path, ending) for ending in _ENDINGS)


reader = Reader("Hugging Face folder", _recognises, open_folder)
