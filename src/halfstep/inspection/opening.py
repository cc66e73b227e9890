"""Open a checkpoint of any kind: ask each reader whether it knows the path."""

import os
from functools import cache
from itertools import islice
from pathlib import Path

from halfstep.errors import CheckpointError
from halfstep.inspection.files import File
from halfstep.inspection.limits import REPEATS, SMALL, check_count
from halfstep.inspection.readers.base import Reader
from halfstep.inspection.stored import Checkpoint
from halfstep.registry import collect


_NAMED = 3  # checkpoints that an error about a folder names


@cache
def readers() -> dict[str, Reader]:
    """Every reader by name; a new kind of checkpoint is one new file in `readers/`."""
    return collect("halfstep.inspection.readers", Reader)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, a file or a folder. Only headers are read; nothing that is stored is run.

    Raises:
        CheckpointError: there is no such path, no reader knows it, or it is broken.
    """
    path = Path(os.path.expanduser(path))
    if not os.path.isdir(path):
        File.of(path)  # says what is wrong with it, if it is no file
    try:
        for reader in readers().values():
            if reader.recognises(path):
                return _checked(reader.open(path))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    raise CheckpointError(f"{str(path)!r} {_unknown(path)}")


def _unknown(path: Path) -> str:
    """What is said of a path that no reader knows: what of it can be opened, if it is a folder."""
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
    """What holds for every kind: names are text and differ, and tensors do not claim far more bytes than there are."""
    check_count(len(checkpoint.tensors), checkpoint.path)
    seen: set[str] = set()
    for tensor in checkpoint.tensors:
        if tensor.name in seen:
            raise CheckpointError(
                f"{checkpoint.path}: two tensors are called {tensor.name!r}; open its files one by one"
            )
        seen.add(tensor.name)
    texts = [*seen, *checkpoint.metadata, *checkpoint.metadata.values()]
    if any(not _is_text(text) for text in texts):
        raise CheckpointError(f"{checkpoint.path}: a name or a value of the metadata holds half a character")
    claimed = sum(tensor.nbytes for tensor in checkpoint.tensors)
    present = sum(File.of(file).size for file in checkpoint.files)
    if claimed > REPEATS * present + SMALL:
        raise CheckpointError(
            f"{checkpoint.path}: its tensors claim {claimed} bytes and its files have {present}; expected at most "
            f"{REPEATS} times as many and a GiB. Save expanded tensors contiguous, and arrays uncompressed"
        )
    return checkpoint


def _is_text(text: str) -> bool:
    """Whether it can be written as UTF-8, which lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
