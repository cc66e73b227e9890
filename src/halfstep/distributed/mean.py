"""The mean of the ranks' gradients, sent in few bits and summed in float32; and ranks simulated in one process."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.distributed.collectives import Buffers, Exchange
from halfstep.distributed.message import Message, granule
from halfstep.recipe import Storage


Steps = Generator[Any, None, Any]
"""A reduction in steps: each time it yields a collective that is under way, and goes on once that is done."""


def mean_steps(values: Tensor, storage: Storage, exchange: Exchange, residual: Tensor | None = None) -> Steps:
    """Replace values, of one dimension, by their mean over the ranks, rounded twice whatever their number.

    Each rank's values are encoded, and each rank gets every other's codes of its share; it sums their values in
    float32 in rank order, divides by the number of ranks, encodes the mean, and all gather it. All ranks get the same
    bits. An infinity or NaN on any rank makes its block NaN on all of them.

    Args:
        residual: float32, of the values' size: added to them before they are rounded, and set to what rounding took
            from them, and, in this rank's share, from the mean, times the number of ranks. Kept where the mean is not
            finite, since such a step is skipped.
    """
    ranks, size = exchange.ranks, values.numel()
    unit = granule(storage)
    share = -(-size // (ranks * unit)) * unit
    message = Message(storage, share)
    whole = values if residual is None else residual + values  # float32, and apart from both
    got, everyone = (exchange.buffers.take((ranks, message.bytes), torch.uint8, values.device) for _ in range(2))
    sent = everyone if residual is None else exchange.buffers.take((ranks, message.bytes), torch.uint8, values.device)
    for rank, piece in enumerate(shares(whole, ranks, share)):
        message.encode(piece, got[rank] if rank == exchange.rank else sent[rank])
    yield exchange.all_to_all(got, sent)
    total = None if residual is None else exchange.buffers.take((share,), torch.float32, values.device)
    mean_of(got, message, exchange.buffers, everyone[exchange.rank], total)
    yield exchange.all_gather(everyone)
    for rank, piece in enumerate(shares(values, ranks, share)):
        message.decode(everyone[rank], piece)
        start = rank * share
        if start < size < start + share:
            values[start:] = piece[: size - start]
    if residual is not None and total is not None:
        if all(end.isfinite() for end in torch.aminmax(values)):  # of a NaN they are NaN
            sent[exchange.rank] = got[exchange.rank]
            _feed_back(residual, whole, sent, message, (total, everyone[exchange.rank], exchange.rank))
        exchange.buffers.give(sent, total)
    exchange.buffers.give(got, everyone)


def mean_of(
    messages: Tensor, message: Message, buffers: Buffers, out: Tensor | None = None, total: Tensor | None = None
) -> None:
    """Form the mean of one message of each rank, in float32 and in rank order: as a message to `out`, and as values to
    `total`."""
    if message.mean(messages, out, total):
        return
    found, part = (buffers.take((message.length,), torch.float32, messages.device) for _ in range(2))
    message.decode(messages[0], found)
    for each in messages[1:]:
        message.decode(each, part)
        found += part
    found.div_(len(messages))
    if out is not None:
        message.encode(found, out)
    if total is not None:
        total.copy_(found)
    buffers.give(found, part)


def shares(values: Tensor, ranks: int, share: int) -> list[Tensor]:
    """Each rank's share of the values, in their memory; the last ones are copies, padded with zeros."""
    pieces = [values[start : start + share] for start in range(0, ranks * share, share)]
    missing = [share - piece.numel() for piece in pieces]
    return [torch.cat([x, x.new_zeros(few)]) if few else x for x, few in zip(pieces, missing, strict=True)]


def _feed_back(
    residual: Tensor, whole: Tensor, sent: Tensor, message: Message, mean: tuple[Tensor, Tensor, int]
) -> None:
    """Set the residual to what rounding took."""
    total, own, rank = mean
    share, size = total.numel(), whole.numel()
    rounded = torch.empty(len(sent), share, dtype=torch.float32, device=whole.device)
    for each, row in zip(sent, rounded, strict=True):
        message.decode(each, row)
    torch.sub(whole, rounded.view(-1)[:size], out=residual)
    message.decode(own, rounded[rank])
    taken = (total - rounded[rank]).mul_(len(sent))
    residual[rank * share : (rank + 1) * share] += taken[: max(0, min(share, size - rank * share))]


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
