"""Parameters that are spread over ranks (DTensors): this rank's part, and where in the whole it lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OptimizerError


def is_spread(tensor: Tensor) -> bool:
    """Whether ranks hold parts of it."""
    return hasattr(tensor, "device_mesh")


def placed(tensor: Tensor) -> object:
    """How it is spread, and its shape; None where it is not."""
    spread: Any = tensor
    return (spread.shape, spread.placements, spread.device_mesh.shape) if is_spread(tensor) else None


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory with the whole."""
    spread: Any = tensor
    return spread.to_local() if is_spread(tensor) else tensor


def like(whole: Tensor, tensor: Tensor) -> Tensor:
    """A tensor cut as `whole` is; a gradient may still be a sum over ranks."""
    given: Any = tensor
    if is_spread(tensor) and given.placements != whole.placements:  # type: ignore[attr-defined]
        given = given.redistribute(placements=whole.placements)  # type: ignore[attr-defined]
    return given  # type: ignore[no-any-return]


def spread_like(part: Tensor, whole: Tensor) -> Tensor:
    """A tensor that is spread as `whole` is, with `part` as this rank's part."""
    if not is_spread(whole):
        return part
    result = torch.empty_like(whole, dtype=part.dtype)
    local(result).copy_(part)
    return result


def positions(tensor: Tensor) -> Tensor | None:
    """The index, in the whole tensor laid out flat, of each element of this rank's part; None where that is the whole.

    Raises:
        OptimizerError: it is cut in another way than in runs along its dimensions.
    """
    if not is_spread(tensor):
        return None
    whole: Any = tensor
    starts, sizes = [0] * whole.dim(), list(whole.shape)
    for axis, placement in enumerate(whole.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or hasattr(placement, "split_factor"):
            raise OptimizerError(
                f"a parameter of shape {tuple(whole.shape)} is placed as {placement}; stochastic rounding knows "
                "Shard and Replicate. Use a recipe that rounds to nearest ('bf16-kahan', 'bf16-split')"
            )
        dim, parts = placement.dim % whole.dim(), whole.device_mesh.size(axis)
        longest = -(-sizes[dim] // parts)
        start = min(whole.device_mesh.get_local_rank(axis) * longest, sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + start, min(longest, sizes[dim] - start)
    if sizes == list(whole.shape):
        return None
    index = torch.zeros((), dtype=torch.int64, device=whole.device)
    for start, size, length in zip(starts, sizes, whole.shape, strict=True):
        index = index[..., None] * length + torch.arange(start, start + size, device=whole.device)
    return index.view(sizes)
