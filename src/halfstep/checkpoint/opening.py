"""Open a checkpoint of any kind: ask each reader whether it knows the path."""

from functools import cache
from pathlib import Path

from halfstep.checkpoint.readers.base import Reader
from halfstep.checkpoint.stored import Checkpoint
from halfstep.errors import CheckpointError
from halfstep.registry import collect


@cache
def readers() -> dict[str, Reader]:
    """Every reader by name; a new kind of checkpoint is one new file in `readers/`."""
    return collect("halfstep.checkpoint.readers", Reader)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, a file or a folder. Only headers are read; nothing that is stored is run.

    Raises:
        CheckpointError: there is no such path, no reader knows it, or it is broken.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"{str(path)!r}: no such file or folder")
    for reader in readers().values():
        if reader.recognises(path):
            return reader.open(path)
    kinds = ", ".join(sorted(readers()))
    raise CheckpointError(f"{str(path)!r} is no checkpoint of a known kind; expected one of: {kinds}")
