"""Ranks of a reduction in one process, for figures and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.distributed.collectives import Buffers
from halfstep.distributed.mean import Steps


class Simulated:
    """What stands for a rank's `Exchange`: its collectives are done when all ranks have begun them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.sent, self.buffers = 0, Buffers()

    def all_to_all(self, out: Tensor, given: Tensor) -> Any:
        """As `Exchange.all_to_all`."""
        self.sent += given[0].nbytes * (self.ranks - 1)
        given[self.rank] = out[self.rank]
        return out, given, lambda all_given: torch.stack([each[self.rank] for each in all_given])

    def all_gather(self, out: Tensor) -> Any:
        """As `Exchange.all_gather`."""
        given = out[self.rank]
        self.sent += given.nbytes * (self.ranks - 1)
        return out, given, lambda all_given: torch.stack(list(all_given))


def run(steps: Callable[[Any], Steps], ranks: int) -> Sequence[Simulated]:
    """Run a reduction on that many ranks, of which each gets its exchange; these are returned."""
    exchanges = [Simulated(rank, ranks) for rank in range(ranks)]
    every = [steps(exchange) for exchange in exchanges]
    while begun := [one for each in every if (one := next(each, None)) is not None]:
        for out, _, taken in begun:
            out.copy_(taken([given for _, given, _ in begun]).view_as(out))
    return exchanges
