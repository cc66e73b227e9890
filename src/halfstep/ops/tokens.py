"""The tokens of a linear layer's input, spread over ranks (sequence parallel), and how ranks send them as codes."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import ModelError
from halfstep.ops.casts import Quantized


@dataclass(frozen=True)
class Tokens:
    """How the rows of an input lie on ranks.

    Args:
        shape: of the whole input.
        dim: the dimension that is cut, into parts of one size.
    """

    mesh: Any
    shape: torch.Size
    dim: int

    @property
    def before(self) -> int:
        """How often a rank has rows that follow one another in the whole input."""
        return prod(self.shape[: self.dim])

    def gather(self, own: Tensor) -> Tensor:
        """The rows of all ranks, in the order of the whole input, of as many on each rank."""
        group = self.mesh.get_group()
        everyone = own.new_empty((dist.get_world_size(group), *own.shape))
        given = own.contiguous().flatten().view(torch.uint8)  # gloo sends no float8
        dist.all_gather_into_tensor(everyone.flatten().view(torch.uint8), given, group)
        return everyone.view(len(everyone), self.before, -1, *own.shape[1:]).transpose(0, 1).flatten(0, 2)

    def all_of(self, own: Quantized, rows: int) -> Quantized:
        """The codes of all ranks, of each rank's first rows, and scales that rows do not share with other ranks."""
        scales = own.quantizer.scales
        spread = "codes", *(own.tensors if scales is not None and scales.tile.rows else ())
        tensors = {name: self.gather(each[:rows]) if name in spread else each for name, each in own.tensors.items()}
        return replace(own, shape=(len(tensors["codes"]), own.shape[-1]), tensors=tensors)

    def scatter(self, whole: Tensor, like: Tensor) -> Tensor:
        """A rank's part, of the shape and dtype of `like`, of the sum of all ranks' tensors."""
        given: Any = dist  # whose module of DTensors is imported, since there are some
        parts = whole.view(self.shape).to(like.dtype)
        summed = given.tensor.DTensor.from_local(parts, self.mesh, [given.tensor.Partial()], run_check=False)
        return summed.redistribute(placements=[given.tensor.Shard(self.dim)]).to_local()  # type: ignore[no-any-return]


def tokens_of(x: Any, mesh: Any) -> Tokens:
    """Those of a DTensor that is cut along another dimension than its last.

    Raises:
        ModelError: ranks have not as many each.
    """
    dim = x.placements[0].dim % x.dim()
    if x.shape[dim] % mesh.size():
        raise ModelError(
            f"dimension {dim} of an input of shape {tuple(x.shape)} is spread over {mesh.size()} ranks, which send "
            "codes of as many tokens each: pad it to a multiple, or take ColwiseParallel, which gathers what there is"
        )
    return Tokens(mesh, x.shape, dim)
