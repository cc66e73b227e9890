"""The mean of the ranks' gradients, sent as encoded messages; FP8-LM's reduction; simulated ranks in one process."""

from collections.abc import Callable, Generator, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from halfstep.distributed.collectives import Buffers, Exchange
from halfstep.kernels.cpu import means
from halfstep.kernels.operator import amax_of
from halfstep.ops.casts import Quantized, decode, encode, quantize, round_to
from halfstep.quant import Quantizer
from halfstep.recipe import Storage


_ALIGNED = 8  # bytes: the alignment at which a view of any dtype may start


class Message:
    """Encodes `length` elements in the format of a storage to a buffer of `bytes` uint8 elements, and decodes it.

    Messages are bytes because gloo does not send float8, and NCCL not on every GPU.

    Args:
        storage: fp32, bf16 or fp16; or codes with tiles along the flattened tensor.
        length: elements, a multiple of `granule(storage)`.
        shape: the tensor's shape, if tiles are not along the flattened tensor.
    """

    def __init__(self, storage: Storage, length: int, shape: tuple[int, ...] | None = None) -> None:
        self._storage, self.length = storage, length
        self._shape = storage.matrix(shape or (length,))
        self._parts: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
        end = 0
        for name, (dtype, own) in storage.layout("codes", shape or (length,)).items():
            start, size = _round_up(end, _ALIGNED), prod(own) * dtype.itemsize
            self._parts[name], end = (dtype, own, start, start + size), start + size
        self.bytes = _round_up(end, _ALIGNED)

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Encode 1-D `values` into `message`, a uint8 tensor of `bytes` elements. In codes an infinity or NaN makes its
        tile NaN."""
        tensors = self._views(message)
        if self._storage.dtype is not None:
            tensors["codes"].copy_(values.view(tensors["codes"].shape))
            return
        quantizer = self._storage.quantizer
        quantize(values.view(self._shape), quantizer, out=Quantized(quantizer, self._shape, values.dtype, tensors))

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Decode a message into a 1-D tensor. Codes saturate to an fp16 `out`."""
        tensors = self._views(message)
        if self._storage.dtype is not None:
            out.view(tensors["codes"].shape).copy_(tensors["codes"])
            return
        found = out if out.dtype in (torch.float32, torch.bfloat16) else torch.empty_like(out, dtype=torch.float32)
        Quantized(self._storage.quantizer, self._shape, found.dtype, tensors).dequantize(out=found.view(self._shape))
        if found is not out:
            limit = torch.finfo(out.dtype).max
            out.copy_(found.clamp_(-limit, limit))

    def mean(self, messages: Tensor, out: Tensor | None, total: Tensor | None) -> bool:
        """Write the mean of messages (one a row), summed in float32 in row order, with a fused kernel: encoded to `out`
        and decoded to `total`. False if no kernel applies; nothing is written then."""
        quantizer, codes = self._storage.quantizer, self._parts["codes"]
        if self._storage.dtype is not None or codes[1][0] != 1:
            return False
        return means.run(messages, quantizer, self.length, self._parts["codes_scale"][2], out, total)

    def _views(self, message: Tensor) -> dict[str, Tensor]:
        parts = self._parts.items()
        prefix = "" if self._storage.dtype is not None else "codes_"
        return {
            name.removeprefix(prefix): message[start:stop].view(dtype).view(shape)
            for name, (dtype, shape, start, stop) in parts
        }


def granule(storage: Storage) -> int:
    """The number of elements of which a message's length must be a multiple: a tile's columns, or 8 without tiles."""
    scales = storage.quantizer.scales
    return _ALIGNED if storage.dtype is not None or scales is None else scales.tile.columns


def spread(values: Tensor, lengths: Sequence[int], storage: Storage, rows: int = 1) -> Tensor:
    """Copy the concatenated values of parameters so that each begins at a tile, padded with zeros: an element's
    rounding then does not depend on neighbouring parameters. Returns `values` itself if they are so aligned already.

    Args:
        values: 1-D, parameters of `lengths` elements one after the other.
        rows: the number of parts into which each parameter is cut, one for each row (rank) of the result: which rank
            sums an element then does not depend on the neighbours either.
    """
    unit = granule(storage)
    if rows == 1 and (storage.dtype is not None or all(length % unit == 0 for length in lengths[:-1])):
        return values
    found = values.new_zeros(rows * sum(_round_up(-(-length // rows), unit) for length in lengths))
    for piece, own in _pieces(values, found, lengths, unit, rows):
        own.copy_(piece)
    return found


def copy_back(found: Tensor, lengths: Sequence[int], storage: Storage, values: Tensor, rows: int = 1) -> None:
    """Copy the result of `spread` back to `values`, from which it was made."""
    if found is not values:
        for piece, own in _pieces(values, found, lengths, granule(storage), rows):
            piece.copy_(own)


def _pieces(
    values: Tensor, found: Tensor, lengths: Sequence[int], unit: int, rows: int
) -> Iterator[tuple[Tensor, Tensor]]:
    start, matrix = 0, found.view(rows, -1)
    for piece in values.split_with_sizes(list(lengths)):
        width = _round_up(-(-piece.numel() // rows), unit)
        for row, part in enumerate(piece.split(width)):  # type: ignore[no-untyped-call]
            yield part, matrix[row, start : start + part.numel()]
        start += width


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


Steps = Generator[Any, None, Any]
"""A reduction as a generator: it yields each collective that it has started, and must be resumed when that is done."""


def mean_steps(values: Tensor, storage: Storage, exchange: Exchange, residual: Tensor | None = None) -> Steps:
    """Replace 1-D `values` in place by their mean over the ranks. Each element is rounded twice, whatever the number of
    ranks.

    Each rank encodes its values and sends every other rank its share of them. It decodes the shares that it receives,
    sums them in float32 in rank order, divides by the number of ranks and encodes the mean, which all ranks gather. All
    ranks get the same bits. In codes an infinity or NaN on any rank makes its tile NaN on all.

    Args:
        residual: float32, of the shape of `values`: added to them before rounding, and then set to the rounding errors
            of the encoded values plus, within this rank's share, the mean's rounding error times the number of ranks.
            Unchanged if the mean is not finite, since the optimizer skips such a step.
    """
    ranks, size = exchange.ranks, values.numel()
    unit = granule(storage)
    share = -(-size // (ranks * unit)) * unit
    message = Message(storage, share)
    whole = values if residual is None else residual + values  # with a residual a new float32 tensor
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
        if all(end.isfinite() for end in torch.aminmax(values)):  # aminmax of a tensor with a NaN is NaN
            sent[exchange.rank] = got[exchange.rank]
            _feed_back(residual, whole, sent, message, (total, everyone[exchange.rank], exchange.rank))
        exchange.buffers.release(sent, total)
    exchange.buffers.release(got, everyone)


def mean_of(
    messages: Tensor, message: Message, buffers: Buffers, out: Tensor | None = None, total: Tensor | None = None
) -> None:
    """Write the mean of the ranks' messages (one a row), summed in float32 in rank order: encoded to `out` and decoded
    to `total`."""
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
    buffers.release(found, part)


def shares(values: Tensor, ranks: int, share: int) -> list[Tensor]:
    """The values cut into one share for each rank, as views; shares beyond the end are copies padded with zeros."""
    pieces = [values[start : start + share] for start in range(0, ranks * share, share)]
    missing = [share - piece.numel() for piece in pieces]
    return [torch.cat([x, x.new_zeros(few)]) if few else x for x, few in zip(pieces, missing, strict=True)]


def _feed_back(
    residual: Tensor, whole: Tensor, sent: Tensor, message: Message, mean: tuple[Tensor, Tensor, int]
) -> None:
    """Set the residual to the rounding errors of `sent` and, in this rank's share, of the mean (times the ranks).

    Args:
        mean: the float32 mean of this rank's share, that mean encoded, and this rank.
    """
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
    """A stand-in for a rank's `Exchange`; `run` completes its collectives when all simulated ranks have begun them."""

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
    """Run a reduction on simulated ranks in one process: `steps` is called with each rank's exchange. Returns these."""
    exchanges = [Simulated(rank, ranks) for rank in range(ranks)]
    every = [steps(exchange) for exchange in exchanges]
    while begun := [one for each in every if (one := next(each, None)) is not None]:
        for out, _, taken in begun:
            out.copy_(taken([given for _, given, _ in begun]).view_as(out))
    return exchanges


MOST, SHARE, RAISE = 2.0, 1e-5, 2.0 ** (1 / 1000)
"""mu's upper limit, the share of saturated sums above which mu is halved, and the factor by which it else grows."""


def fp8lm_steps(
    values: Tensor, lengths: Sequence[int], quantizer: Quantizer, exchange: Exchange, mu: Tensor, adapts: bool = True
) -> Steps:
    """Replace the gradients of parameters of `lengths` elements, concatenated in `values`, in place by FP8-LM's mean.

    s = mu 2^floor(log2(max / amax)) for each parameter, with the largest amax of all ranks. codes(s g) are added rank
    by rank, and each sum is rounded and saturated; the mean is the sum divided by s N. A parameter with a non-finite
    gradient on any rank becomes NaN. A ring or tree, which adds in another order, gives other roundings.

    Args:
        mu: float32, one element for each parameter, the same on all ranks; halved in place if over 0.001% of the sum
            saturates, else multiplied by 2^(1/1000), up to 2.
        adapts: whether to change mu.

    Source: Peng et al. 2023, arXiv 2310.18313, section 2.1.
    """
    format, ranks, size = quantizer.format, exchange.ranks, values.numel()
    scale = mu * (yield from _factors(values, lengths, quantizer, exchange))
    pieces = zip(values.split_with_sizes(list(lengths)), scale, strict=True)
    scaled = torch.cat([piece.float() * each for piece, each in pieces])
    share = -(-size // ranks)
    sent = torch.stack([encode(piece, format) for piece in shares(scaled, ranks, share)])
    got = sent.clone()
    yield exchange.all_to_all(got, sent)
    total = decode(got[0], format)
    for other in got[1:]:
        total = round_to(total + decode(other, format), format)
    sent[exchange.rank] = encode(total, format)
    yield exchange.all_gather(sent)
    parts = decode(sent.view(-1)[:size], format).split_with_sizes(list(lengths))
    if adapts:
        full = torch.stack([(part.abs() == format.max).float().mean() for part in parts])
        mu.copy_(torch.where(full > SHARE, mu / 2, (mu * RAISE).clamp(max=MOST)))
    values.copy_(torch.cat([part / (each * ranks) for part, each in zip(parts, scale, strict=True)]))


def _factors(values: Tensor, lengths: Sequence[int], quantizer: Quantizer, exchange: Exchange) -> Steps:
    """The scale factor of each parameter without mu; NaN if a gradient is not finite on any rank."""
    amax = torch.stack([amax_of(piece).float() for piece in values.split_with_sizes(list(lengths))])
    amax = torch.where(amax.isnan(), torch.inf, amax)  # some backends' maximum drops NaN
    everyone = amax.repeat(exchange.ranks, 1)
    yield exchange.all_gather(everyone)
    factor = quantizer.tiling.rule.factor(everyone.amax(0), quantizer.format)
    assert factor is not None
    return torch.where(everyone.amax(0) == 0, 1.0, factor)
