"""The plain tensors of a setup: what they are made of, where they lie, and what their bits say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.bits.scan import Scan, readable, scan
from halfstep.bits.values import TYPES, InMemory, runs


PIECE = 1 << 22
"""Values that are compared at once."""


def leaves(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every plain tensor in a value, with its path: this rank's shard of a DTensor, the codes and scales of a
    quantised state, what lists and dictionaries hold. Other values hold none.
    """
    if isinstance(value, Tensor):
        yield from _plain(value.detach(), path)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from leaves(one, f"{path}.{number}")


def _plain(tensor: Tensor, path: str) -> Iterator[tuple[str, Tensor]]:
    if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol for tensors that are made of others
        named = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
        parts = {name: part for name, part in named.items() if isinstance(part, Tensor)}  # a DTensor names its mesh too
        for name, part in parts.items():
            yield from _plain(part, path if len(parts) == 1 else f"{path}.{name}")
    elif tensor.layout == torch.sparse_coo:
        yield from ((f"{path}.indices", tensor._indices()), (f"{path}.values", tensor._values()))
    else:
        yield path, tensor


def name_of(dtype: torch.dtype) -> str:
    """torch's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def size(tensor: Tensor) -> int:
    """The bytes of a plain tensor: an expanded one takes those of its storage, a freed one takes no bytes."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def values(tensor: Tensor) -> int:
    """How many values a plain tensor keeps: an expanded one those of its storage; a freed one counts what it had."""
    return size(tensor) // tensor.element_size() or tensor.numel()


def place(tensor: Tensor) -> tuple[object, ...] | None:
    """Where a plain tensor's bytes lie, equal for two names of the same ones; None where it has none."""
    if tensor.device.type == "meta" or not size(tensor):
        return None
    return tensor.device, tensor.data_ptr(), size(tensor)


def scanned(tensor: Tensor) -> Scan | None:
    """What the bits of a plain tensor say; None where they are not floating-point numbers, or are not there."""
    if place(tensor) is None or name_of(tensor.dtype) not in TYPES:
        return None
    once = InMemory(tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())])
    return scan(once) if readable(once) else None


def rounds_to(full: Tensor, narrow: Tensor) -> bool:
    """Whether `narrow` holds the values of `full` in its own dtype."""
    wide, few = list(leaves(full, "")), list(leaves(narrow, ""))
    pairs = list(zip(wide, few, strict=False))
    if len(wide) != len(few) or any(
        a.shape != b.shape or place(a) is None or place(b) is None for (_, a), (_, b) in pairs
    ):
        return False
    pieces = ((a, b) for (_, one), (_, two) in pairs for a, b in zip(runs(one, PIECE), runs(two, PIECE), strict=True))
    return all(torch.equal(a.to(b.dtype).to(b.device), b) for a, b in pieces)
