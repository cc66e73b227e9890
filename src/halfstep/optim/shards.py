"""Ranks that train together: their one seed, and parameters spread over them (DTensors), of which each has a part."""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.ops import codes
from halfstep.recipe import Storage


def are_several(process_group: Any) -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


def first_ranks(seed: int, process_group: Any) -> int:
    """The seed that the group's first process gave; each of them calls this once."""
    box = [seed]
    dist.broadcast_object_list(box, group=process_group, group_src=0)
    return box[0]


# ---- parameters spread over ranks: this one's part, and where in the whole it lies -----------------------------------


def is_spread(tensor: Tensor) -> bool:
    """Whether ranks hold parts of it."""
    return hasattr(tensor, "device_mesh")


def placed(tensor: Any) -> object:
    """How it is spread, and its shape; None where it is not."""
    return (tensor.shape, tensor.placements, tensor.device_mesh.shape) if is_spread(tensor) else None


def local(tensor: Any) -> Tensor:
    """This rank's part, sharing memory with the whole."""
    return tensor.to_local() if is_spread(tensor) else tensor  # type: ignore[no-any-return]


def part(tensor: Tensor) -> Tensor:
    """The same of one that is, as `to_local` without what autograd needs: for a step that asks at every parameter."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


def like(whole: Any, tensor: Any) -> Tensor:
    """A tensor cut as `whole` is; a gradient may still be a sum over ranks."""
    if is_spread(tensor) and tensor.placements != whole.placements:
        tensor = tensor.redistribute(placements=whole.placements)
    return tensor  # type: ignore[no-any-return]


def spread_like(part: Tensor, whole: Tensor) -> Tensor:
    """A tensor that is spread as `whole` is, with `part` as this rank's part."""
    if not is_spread(whole):
        return part
    result = torch.empty_like(whole, dtype=part.dtype)
    local(result).copy_(part)
    return result


def whole(tensor: Any) -> Tensor:
    """All of it, gathered from the ranks that hold parts."""
    return tensor.full_tensor() if is_spread(tensor) else tensor  # type: ignore[no-any-return]


def cut_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that every rank has all of, cut as `tensor` is.

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
    """The index, in the whole tensor laid out flat, of each element of this rank's part; None where that is the whole.

    Raises:
        OptimizerError: it is cut in another way than in runs along its dimensions.
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
    """The same as start, run and stride: this rank's element i is number start + i // run * stride + i % run of the
    whole. None where that is not so: a cut along other dimensions than the first and one more.

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
    """Where along each dimension this rank's part begins, and how long it is."""
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


# ---- moments that are codes: each rank encodes its own part, in whole tiles ------------------------------------------


def fits(kind: Storage, parameter: Tensor) -> bool:
    """Whether every rank's part is as long as the others' and made of whole tiles: then codes and scales of the parts,
    laid side by side, are those of the whole, and a checkpoint of one number of ranks is one of every other.

    Raises:
        OptimizerError: tiles are not pieces of a row, or all of them hang together.
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
    """The tensors of a moment that is zero, spread as the parameter is."""
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
    """Into how many runs of rows it is cut; None where it is cut otherwise."""
    parts = 1
    for axis, placement in enumerate(whole.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim % whole.dim() or hasattr(placement, "split_factor") or parts > 1:
            return None
        parts = whole.device_mesh.size(axis)
    return parts
