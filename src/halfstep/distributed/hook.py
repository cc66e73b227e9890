"""DDP's communication hook: buckets in few bits. torch reads its annotations, which are no strings here."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.reduction import Reduction


def fp8_hook(state: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients over the ranks, in the format that the state says (E4M3 by default).

        ddp.register_comm_hook(Reduction(), fp8_hook)

    Buckets go out as they come, while the backward pass computes; each is summed when the next one has gone out, and
    the last one waits for all. `compress(ddp)` is this and more: ranks agree first, and the state is saved.

    Args:
        state: of one DDP model.
        bucket: DDP's.

    Raises:
        ModelError: another rank has failed.
    """
    values = bucket.buffer()
    if bucket.index() == 0:
        state.check_begin()
    future: Any = torch.futures.Future(devices=[values.device] if values.is_cuda else None)
    state.begin(values, bucket.parameters(), lambda: future.set_result(values))
    if bucket.is_last():
        state.finish()
    return future  # type: ignore[no-any-return]
