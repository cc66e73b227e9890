"""Files that a folder or an index names: inside the folder, or in the store of the Hugging Face cache it belongs to."""

from pathlib import Path, PurePosixPath, PureWindowsPath

from halfstep.errors import CheckpointError


def inside(folder: Path, name: str, what: str) -> Path:
    """The path of the file called `name` in `folder`.

    A link may lead out of the folder in one case: the cache of Hugging Face keeps models--a--b/snapshots/<revision>
    full of links to models--a--b/blobs, and nothing else of that cache can be reached.

    Raises:
        CheckpointError: the name is absolute or goes up, or the file is a link to somewhere else.
    """
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    if not name or ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
        raise CheckpointError(f"{what} names the file {name[:200]!r}; expected one in its own folder")
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{what} names the file {name[:200]!r}, which is not there: {error}") from error
    stores = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if not any(target.is_relative_to(allowed) for allowed in (home, *stores)):
        raise CheckpointError(
            f"{what}: {name[:200]!r} is a link to {str(target)!r}, out of the folder; expected a file, or a link into "
            "the blobs of the Hugging Face cache that the folder belongs to"
        )
    return path
