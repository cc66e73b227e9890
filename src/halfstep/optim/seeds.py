"""One seed of stochastic rounding for all the processes that train together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def are_several(process_group: Any) -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


def first_ranks(seed: int, process_group: Any) -> int:
    """The seed that the group's first process gave; each of them calls this once."""
    box = [seed]
    dist.broadcast_object_list(box, group=process_group, group_src=0)
    return box[0]
