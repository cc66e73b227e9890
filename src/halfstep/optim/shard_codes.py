"""Moments that are codes, of a parameter that is spread over ranks: each rank encodes its own part, in whole tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.ops import codes
from halfstep.optim.shards import local
from halfstep.recipe import Storage


def fits(kind: Storage, parameter: Tensor) -> bool:
    """Whether every rank's part is as long as the others' and made of whole tiles: then codes and scales of the parts,
    laid side by side, are those of the whole, and a checkpoint of one number of ranks is one of every other.

    Raises:
        OptimizerError: tiles are not pieces of a row, or all of them hang together.
    """
    scales = kind.quantizer.scales
    tile = scales.tile if scales else None
    if tile is None or scales is None or tile.rows != 1 or not tile.columns or scales.rule.two_level:
        raise OptimizerError(
            f"a moment of a sharded parameter of shape {tuple(parameter.shape)} would be kept as {kind}, which needs "
            "the whole tensor, and no rank has it. Under fully_shard keep moments in tiles along rows ('adamw-8bit', "
            "'coat'), or in fp32, bf16 or fp16"
        )
    parts = _parts(parameter)
    if parts is None or parameter.shape[0] % parts:
        return False
    return parameter.numel() // parts % tile.columns == 0 if kind.flat else parameter.dim() > 1


def start(kind: Storage, name: str, parameter: Tensor) -> dict[str, Tensor]:
    """The tensors of a moment that is zero, spread as the parameter is."""
    whole: Any = parameter
    own = codes.store_zeros(kind, name, tuple(local(parameter).shape), local(parameter).device)
    dim = 1 if kind.flat else 0
    placements = [type(placement)(dim) if placement.is_shard() else placement for placement in whole.placements]
    spread = {}
    for part, (dtype, shape) in kind.layout(name, tuple(parameter.shape)).items():
        stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        given = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
        spread[part] = type(whole).from_local(own[part], whole.device_mesh, placements, **given)
    return spread


def _parts(parameter: Tensor) -> int | None:
    """Into how many runs of rows it is cut; None where it is cut otherwise."""
    whole: Any = parameter
    parts = 1
    for axis, placement in enumerate(whole.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim % whole.dim() or hasattr(placement, "split_factor") or parts > 1:
            return None
        parts = whole.device_mesh.size(axis)
    return parts
