"""Tokens that are spread over ranks (sequence parallel), gathered as codes."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel


class GatherCodes(ColwiseParallel):
    """torch's `ColwiseParallel` of a layer whose input's tokens are spread over ranks, and whose recipe rounds them:
    ranks send their tokens' codes, in the forward pass and again in the backward pass, and keep no others' tokens.

        parallelize_module(model, mesh, {"up": GatherCodes(Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))})

    `ColwiseParallel(input_layouts=Shard(1))` gives the same bits, sends tokens in the dtype that they have, once, and
    keeps all of them for the backward pass.

    Args:
        tokens: the dimension of the input that is spread: `Shard(1)` of (batch, tokens, in).
        options: as `ColwiseParallel`.
    """

    def __init__(self, tokens: Shard, **options: Any) -> None:
        super().__init__(input_layouts=tokens, **options)
        self.desired_input_layouts: tuple[Any] = self.input_layouts  # as they are
