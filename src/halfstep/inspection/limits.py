"""How much a checkpoint may make its reader hold: far above what real ones need, far below what a machine has.

Together they keep the memory of opening and reading below 300 MB, whatever a file says of itself.
"""

import json
from collections import Counter
from typing import Any

from halfstep.errors import CheckpointError


TENSORS = 200_000
"""Tensors in one checkpoint; a mixture of 60 layers with 384 experts each, scales apart, has 140 thousand."""

TEXT = 64 << 20
"""Bytes of a JSON header or index; the largest real ones hold some 20 million."""

PARSED = 160 << 20
"""Bytes that the objects made of a header may take, by the parsers' own upper estimates."""

DIMENSIONS = 64
"""Dimensions of a tensor, as in torch and numpy."""

REPEATS, SMALL = 64, 1 << 30
"""Tensors may together claim 64 times the bytes of their files (strides of 0, compression) and one GiB more."""


def check_count(count: int, what: object) -> None:
    """Check a number of tensors before they are made.

    Raises:
        CheckpointError: it is above the limit.
    """
    if count > TENSORS:
        raise CheckpointError(f"{what}: {count} tensors; expected at most {TENSORS}")


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object that `data` holds.

    Raises:
        CheckpointError: it is not a JSON object, is too deep, too large for memory, or has a key twice.
    """
    needed = _memory(data)
    if needed > PARSED:
        raise CheckpointError(
            f"{what} would take {needed >> 20} MiB of memory; expected at most {PARSED >> 20}: no checkpoint needs more"
        )
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{what} is not JSON: {error}; the file is broken, or is another kind of file") from error
    except RecursionError as error:
        raise CheckpointError(f"{what} nests too deeply; expected an object of flat objects") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is a JSON {type(found).__name__}; expected an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _memory(data: bytes) -> int:
    """An upper estimate: CPython's sizes of a dict, a list and a small value, and of the text itself."""
    width = 1 if data.isascii() else 4  # one wide character makes the whole string wide
    objects = data.count(b"{") * 240 + data.count(b"[") * 96 + data.count(b",") * 64
    return objects + 2 * width * len(data)
