"""What tensor subclasses ask of torch's functions as they pass through dispatch."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfstep.errors import QuantizationError


_aten = torch.ops.aten


def check(func: Any) -> None:
    """Refuse what would go wrong in silence, or change what a wrapper cannot."""
    if getattr(func, "namespace", "") == "c10d":  # what these write to, their schemas do not say
        raise QuantizationError(
            f"{func} of a tensor whose memory is codes, which do not cross the network: send tensor.detach().clone(), "
            "and copy what comes back (tensor.copy_)"
        )
    if func is _aten.view.dtype or torch.Tag.inplace_view in getattr(func, "tags", ()):
        raise QuantizationError(
            f"{func} of a tensor whose memory is codes: it has no bits of its own to show otherwise, and keeps its "
            "shape. Call it on tensor.detach().clone()"
        )


@cache
def _writable(func: Any) -> tuple[tuple[int, str], ...]:
    """Which arguments a function writes to, by place and by name."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that a call writes to."""
    for place, name in _writable(func):
        yield from tree_leaves(args[place] if place < len(args) else kwargs.get(name))


def read_only(array: np.ndarray) -> np.ndarray:
    """The array, which takes no writes from now on."""
    array.flags.writeable = False
    return array


def as_bytes(part: Tensor) -> Tensor:
    """Torch's 8-bit floats as what every function of torch takes, and pickle reads; other tensors as they are."""
    return part.view(torch.uint8) if part.is_floating_point() and part.itemsize == 1 else part
