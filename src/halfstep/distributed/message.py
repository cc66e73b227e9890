"""Values as bytes for other ranks: the codes of a run of elements, and the scales of its blocks behind them."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from halfstep.kernels.cpu import means
from halfstep.ops.casts import Quantized, quantize
from halfstep.recipe import Storage


_ALIGNED = 8  # bytes: what a view of any dtype begins at a multiple of


class Message:
    """The layout of so many elements, encoded as a storage says.

    Every backend sends bytes: gloo takes no float8, and NCCL not on every GPU.

    Args:
        storage: fp32, bf16 or fp16; or codes in tiles laid out flat.
        length: in elements, a multiple of `granule(storage)`.
        shape: of the tensor that they are, where tiles are not laid out flat.
    """

    def __init__(self, storage: Storage, length: int, shape: tuple[int, ...] | None = None) -> None:
        self._storage, self.length = storage, length
        self._shape = storage.matrix(shape or (length,))
        self._parts: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
        end = 0
        for name, (dtype, own) in storage.layout("codes", shape or (length,)).items():
            start, size = _up(end, _ALIGNED), prod(own) * dtype.itemsize
            self._parts[name], end = (dtype, own, start, start + size), start + size
        self.bytes = _up(end, _ALIGNED)

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write the values, of one dimension, into a message, `bytes` of uint8. What is not finite makes
        its block NaN."""
        tensors = self._views(message)
        if self._storage.dtype is not None:
            tensors["codes"].copy_(values.view(tensors["codes"].shape))
            return
        quantizer = self._storage.quantizer
        quantize(values.view(self._shape), quantizer, out=Quantized(quantizer, self._shape, values.dtype, tensors))

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the values of a message into a tensor of one dimension. fp16 takes what is beyond its range as ± its
        largest value."""
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
        """Whether a kernel wrote the mean of messages, one a row, summed in float32 in their order: encoded to `out`,
        and as values to `total`."""
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
    """Elements that are encoded together: a message has a multiple of it."""
    scales = storage.quantizer.scales
    return _ALIGNED if storage.dtype is not None or scales is None else scales.tile.columns


def spread(values: Tensor, lengths: Sequence[int], storage: Storage, rows: int = 1) -> Tensor:
    """Values of so many parameters, each at the beginning of a block, behind zeros: what an element is rounded to then
    does not depend on what lies beside it. The values themselves, where they lie so already.

    Args:
        rows: into how many parts each parameter is cut, one a row: which rank sums an element then does not depend on
            it either.
    """
    unit = granule(storage)
    if rows == 1 and (storage.dtype is not None or all(length % unit == 0 for length in lengths[:-1])):
        return values
    found = values.new_zeros(rows * sum(_up(-(-length // rows), unit) for length in lengths))
    for piece, own in _pieces(values, found, lengths, unit, rows):
        own.copy_(piece)
    return found


def gather(found: Tensor, lengths: Sequence[int], storage: Storage, values: Tensor, rows: int = 1) -> None:
    """Write what `spread` made back into the values it was made of."""
    if found is not values:
        for piece, own in _pieces(values, found, lengths, granule(storage), rows):
            piece.copy_(own)


def _pieces(
    values: Tensor, found: Tensor, lengths: Sequence[int], unit: int, rows: int
) -> Iterator[tuple[Tensor, Tensor]]:
    start, matrix = 0, found.view(rows, -1)
    for piece in values.split_with_sizes(list(lengths)):
        width = _up(-(-piece.numel() // rows), unit)
        for row, part in enumerate(piece.split(width)):  # type: ignore[no-untyped-call]
            yield part, matrix[row, start : start + part.numel()]
        start += width


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
