"""A new folder of a model: weights in one safetensors file or several with an index; whole, or not there at all."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from halfstep.errors import CheckpointError


_UNITS = {"": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", 1)}}
_SPARE = 1 << 24
"""Bytes for headers and small files, beside the tensors."""


@contextmanager
def new_folder(folder: Path, nbytes: int) -> Iterator[Path]:
    """A folder to write to, which is at `folder` when the block ends, and nowhere if it fails or is interrupted.

    Raises:
        CheckpointError: there is something at `folder`, before or afterwards, other than an empty folder; its disk has
            not room for so many bytes; or it cannot be written.
    """
    check_new_folder(folder)
    free = shutil.disk_usage(folder.parent).free
    if free < nbytes + _SPARE:
        raise CheckpointError(
            f"{str(folder)!r} is to take {nbytes:,} bytes, and its disk has {free:,} left; name a folder on another one"
        )
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        yield partial
        check_new_folder(folder)
        partial.rename(folder)  # in the place of an empty folder, too
    except FileExistsError as error:
        raise CheckpointError(f"{str(partial)!r} is in the way; remove it") from error
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_new_folder(folder: Path) -> None:
    """Raise a CheckpointError if there is something at `folder` but an empty folder, or it could not be made there."""
    if folder.is_symlink() or (any(folder.iterdir()) if folder.is_dir() else folder.exists()):
        raise CheckpointError(f"{str(folder)!r} exists and is not empty; name a new folder, or remove it first")
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{str(folder)!r} cannot be written: {str(folder.parent)!r} is not there, or read-only; name a folder in "
            "one that can be written to"
        )


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], most: int, metadata: Mapping[str, str]) -> None:
    """Write `model.safetensors`, or `model-00001-of-0000N.safetensors` and so on with an index.

    Args:
        most: bytes of the tensors of one file; a larger tensor has a file of its own.
        metadata: what each file says of the model.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata=dict(metadata))
        return
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata=dict(metadata))
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def size_of(text: int | str) -> int:
    """Bytes: a number, or a text such as "5GB" (10^9 bytes each).

    >>> size_of("5GB"), size_of("300 MB")
    (5000000000, 300000000)

    Raises:
        CheckpointError: it is neither, or not positive.
    """
    found = re.fullmatch(r"(\d+) ?([KMGT]?B|)", str(text).upper())
    size = int(found[1]) * _UNITS[found[2] if found[2] != "B" else ""] if found else 0
    if size < 1:
        raise CheckpointError(f"a size of {text!r}; expected a number of bytes, or one such as 5GB or 300MB")
    return size


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.nbytes for tensor in tensors.values())


def dtype_of(name: str | torch.dtype | None) -> torch.dtype | None:
    """A floating-point dtype by torch's name or the short one of recipes; None stays None."""
    if name is None or isinstance(name, torch.dtype):
        return name
    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    known |= {str(dtype).removeprefix("torch."): dtype for dtype in known.values()}
    if name not in known:
        raise CheckpointError(f"dtype {name!r} found; expected one of {', '.join(known)}")
    return known[name]
