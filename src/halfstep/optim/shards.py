"""Ranks that train together: their common seed, and sharded parameters (DTensors) and their shards."""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.ops import codes
from halfstep.recipe import Storage


def are_several(process_group: Any) -> bool:
    """Whether the process group has more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


def first_ranks(seed: int, process_group: Any) -> int:
    """The seed of the group's first rank, by a broadcast; every rank must call it."""
    box = [seed]
    dist.broadcast_object_list(box, group=process_group, group_src=0)
    return box[0]


# ---- sharded parameters: this rank's shard and its position in the whole ---------------------------------------------


def is_spread(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh")


def placed(tensor: Any) -> object:
    """The shape, placements and mesh shape of a DTensor; None for other tensors."""
    return (tensor.shape, tensor.placements, tensor.device_mesh.shape) if is_spread(tensor) else None


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; other tensors unchanged."""
    return tensor.to_local() if is_spread(tensor) else tensor  # type: ignore[no-any-return]


def part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, faster than by `to_local`, without autograd."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


def like(whole: Any, tensor: Any) -> Tensor:
    """The tensor redistributed to the placements of `whole`; a gradient may be a partial sum before."""
    if is_spread(tensor) and tensor.placements != whole.placements:
        tensor = tensor.redistribute(placements=whole.placements)
    return tensor  # type: ignore[no-any-return]


def spread_like(part: Tensor, whole: Tensor) -> Tensor:
    """A DTensor with the placements of `whole` and `part` as this rank's shard; `part` itself if `whole` is none."""
    if not is_spread(whole):
        return part
    result = torch.empty_like(whole, dtype=part.dtype)
    local(result).copy_(part)
    return result


def whole(tensor: Any) -> Tensor:
    """The full tensor, gathered from all ranks."""
    return tensor.full_tensor() if is_spread(tensor) else tensor  # type: ignore[no-any-return]


def cut_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that every rank has in full, as a DTensor with the placements of `tensor`.

    Raises:
        OptimizerError: as `positions`.
    """
    if not is_spread(tensor):
        return whole
    own = whole
    for dim, (start, size) in enumerate(zip(*_cut(tensor), strict=True)):
        own = own.narrow(dim, start, size)
    return spread_like(own, tensor)


def positions(whole: Any) -> Tensor | None:
    """The index, in the flattened whole tensor, of each element of this rank's shard; None if that is the whole.

    Raises:
        OptimizerError: a placement is neither Shard nor Replicate.
    """
    if not is_spread(whole):
        return None
    starts, sizes = _cut(whole)
    if sizes == list(whole.shape):
        return None
    index = torch.zeros((), dtype=torch.int64, device=whole.device)
    for start, size, length in zip(starts, sizes, whole.shape, strict=True):
        index = index[..., None] * length + torch.arange(start, start + size, device=whole.device, dtype=torch.int64)
    return index.view(sizes)


def run_of(whole: Any) -> tuple[int, int, int] | None:
    """`positions` as (start, run, stride): element i of this rank's shard has the index start + i // run * stride +
    i % run in the whole. None if there are no such three: shards along other dimensions than the first and one more.

    Raises:
        OptimizerError: as `positions`.
    """
    starts, sizes = _cut(whole)
    shape = list(whole.shape)
    last = max((dim for dim in range(whole.dim()) if sizes[dim] != shape[dim]), default=0)
    if sizes[1:last] != shape[1:last]:
        return None
    start = 0
    for begin, length in zip(starts, shape, strict=True):
        start = start * length + begin
    return start, max(prod(sizes[last:]), 1), prod(shape[last:])


def _cut(whole: Any) -> tuple[list[int], list[int]]:
    """The start and the size of this rank's shard along each dimension."""
    starts, sizes = [0] * whole.dim(), list(whole.shape)
    for axis, placement in enumerate(whole.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or hasattr(placement, "split_factor"):
            raise OptimizerError(
                f"a parameter of shape {tuple(whole.shape)} is placed as {placement}; stochastic rounding and Muon "
                "know Shard and Replicate. Use a recipe that rounds to nearest ('bf16-kahan', 'bf16-split'), and AdamW"
            )
        dim, parts = placement.dim % whole.dim(), whole.device_mesh.size(axis)
        longest = -(-sizes[dim] // parts)
        start = min(whole.device_mesh.get_local_rank(axis) * longest, sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + start, min(longest, sizes[dim] - start)
    return starts, sizes


# ---- moments stored as codes: each rank encodes its own shard, in whole tiles ----------------------------------------


def fits(kind: Storage, parameter: Tensor) -> bool:
    """Whether all ranks' shards are of one size and made of whole tiles. Then the concatenated codes and scales of the
    shards are those of the whole, and checkpoints do not depend on the number of ranks.

    Raises:
        OptimizerError: tiles are not pieces of rows, or scales have two levels.
    """
    scales = kind.quantizer.scales
    if scales is None or scales.tile.rows != 1 or not scales.tile.columns or scales.rule.two_level:
        raise OptimizerError(
            f"a moment of a sharded parameter of shape {tuple(parameter.shape)} would be kept as {kind}, which needs "
            "the whole tensor, and no rank has it. Under fully_shard keep moments in tiles along rows ('adamw-8bit', "
            "'coat'), or in fp32, bf16 or fp16"
        )
    parts = _runs(parameter)
    if parts is None or parameter.shape[0] % parts:
        return False
    return parameter.numel() // parts % scales.tile.columns == 0 if kind.flat else parameter.dim() > 1


def start_codes(kind: Storage, name: str, parameter: Any) -> dict[str, Tensor]:
    """The tensors of a moment of zeros, as DTensors sharded like the parameter."""
    own = codes.store_zeros(kind, name, tuple(local(parameter).shape), local(parameter).device)
    dim = 1 if kind.flat else 0
    placements = [type(placement)(dim) if placement.is_shard() else placement for placement in parameter.placements]
    spread = {}
    for part, (dtype, shape) in kind.layout(name, tuple(parameter.shape)).items():
        stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        given = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
        spread[part] = type(parameter).from_local(own[part], parameter.device_mesh, placements, **given)
    return spread


def _runs(whole: Any) -> int | None:
    """The number of shards along the first dimension; None if it is sharded otherwise."""
    parts = 1
    for axis, placement in enumerate(whole.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim % whole.dim() or hasattr(placement, "split_factor") or parts > 1:
            return None
        parts = whole.device_mesh.size(axis)
    return parts
