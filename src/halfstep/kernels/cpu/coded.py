"""Tensors that a kernel reads and writes as float32 and that are codes in blocks: decoded and encoded by the chunk.

No float32 copy exists but a chunk's, which stays in the cache. Codes and scales are those of `blocks` and `dequantize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from halfstep.formats import Codebook, Float
from halfstep.kernels.cpu import blocks, codebook, element_codes, expansion, whole
from halfstep.kernels.cpu.arrays import array, plain
from halfstep.kernels.cpu.compiled import CHUNK, inner, inner_overload
from halfstep.kernels.cpu.dequantize import meaning, powers_piece, values_piece
from halfstep.kernels.cpu.divided import divided
from halfstep.kernels.cpu.expansion import decode_groups, encode_groups
from halfstep.kernels.cpu.rules import note, room
from halfstep.kernels.cpu.scales import largest_of, power_scalars
from halfstep.kernels.cpu.whole import close_whole, open_whole
from halfstep.quant import Quantizer
from halfstep.quant.scaling.expansion import Expansion


class Coded(NamedTuple):
    """Codes and scales of a tensor, in place of its numbers."""

    quantizer: Quantizer
    parts: Mapping[str, Tensor]
    """By `Quantized`'s names."""
    shape: tuple[int, ...]
    """That it is quantised in."""

    @property
    def supported(self) -> bool:
        """Whether kernels take such codes: of 8 bits, rounded to nearest, in whole blocks along rows, with scales of
        which each follows from its block alone; or under one scale of the tensor (`whole`)."""
        columns = self.shape[-1] if self.shape else 1
        quantizer, scales = self.quantizer, self.quantizer.scales
        if scales is not None and self.whole:
            known = whole.knows(quantizer, self.parts["codes"].dtype)
            known = known and all(hasattr(part, "fake_mode") or plain(part, part.dtype) for part in self.parts.values())
            # Read last: on a GPU the host would wait for it. (Nothing has no scale.)
            return known and self.parts["scale"].numel() == 1 and whole.usual(self.parts["scale"])
        return (
            scales is not None
            and not scales.rule.two_level
            and not scales.rule.narrow
            and quantizer.rounding == "nearest_even"
            and quantizer.format.bits == 8
            and (blocks.numbers_of(quantizer, columns) is not None or expansion.knows(quantizer, columns))
            and all(hasattr(part, "fake_mode") or plain(part, part.dtype) for part in self.parts.values())
        )

    @property
    def whole(self) -> bool:
        """Whether one scale multiplies all of it, so that its codes cannot be written before all has been seen."""
        return whole.is_whole(self.quantizer)

    @property
    def tile(self) -> tuple[np.uint32, ...] | None:
        """`blocks.levels` of its tiles where kernels read and write it a tile at a time (`tiled`): codes of floats, or
        places in a codebook, under scales that are the largest magnitude over the largest element."""
        scales = self.quantizer.scales
        if scales is None or not scales.rule.quotient or not isinstance(self.quantizer.format, Float | Codebook):
            return None
        return blocks.levels(scales.tile)

    def arguments(self, factor: float = 1.0) -> tuple[Any, ...]:
        """What a kernel takes for it: the codes, and six that are None where there is an array of numbers.

        Args:
            factor: what values are multiplied by before they are rounded, of codes under one scale.
        """
        format, scales = self.quantizer.format, self.quantizer.scales
        assert scales is not None
        if self.whole:
            codes, scale = self.parts["codes"], np.float32(self.parts["scale"].item())
            coding: Any = (None, None)
            decoding = None
            if codes.dtype != torch.float16:
                coding, decoding = element_codes.scalars(format, *_NEAREST), meaning(format)
            return array(codes, whole.numpy_type(codes.dtype)), scale, None, decoding, np.float32(factor), *coding
        if isinstance(scales.rule, Expansion):
            kept = tuple(array(self.parts[part], torch.float32) for part in ("scale", "exponent", "center"))
            rule, coding = expansion.scalars(format, scales.rule), element_codes.scalars(format, *_NEAREST)
            return (
                array(self.parts["codes"]),
                kept,
                blocks.levels(scales.tile),
                expansion.meaning(format),
                rule,
                *coding,
            )
        beside = self.parts["scale"].view(-1).numpy(), blocks.levels(scales.tile), meaning(format)
        if isinstance(format, Codebook):
            coding = np.float32(format.max), None, codebook.search(format)
        else:
            scale_of = power_scalars(format, scales.rule) if scales.rule.exact else np.float32(format.max)
            coding = scale_of, *element_codes.scalars(format, *_NEAREST)
        return array(self.parts["codes"]), *beside, *coding


_NEAREST = "nearest_even", "saturate"
PLAIN = (None,) * 6
"""What stands beside an array of numbers."""


def opened(kept: Any, stored: Any, levels: Any, decoding: Any, a: Any, b: Any) -> Any:
    """In kernels: the numbers a to b: part of the array itself; of codes, their values in float32."""
    raise NotImplementedError


def closed(
    kept: Any, stored: Any, levels: Any, scale_of: Any, numbers: Any, codes: Any, values: Any, a: Any, b: Any
) -> Any:
    """In kernels: what `opened` gave, changed since, encoded again where it is codes."""
    raise NotImplementedError


@inner_overload(opened)
def _opened(kept, stored, levels, decoding, a, b):
    if isinstance(stored, types.NoneType):
        return lambda kept, stored, levels, decoding, a, b: kept[a:b]
    if isinstance(levels, types.NoneType):
        return lambda kept, stored, levels, decoding, a, b: open_whole(kept[a:b], stored, decoding)
    if isinstance(stored, types.BaseTuple):
        return lambda kept, stored, levels, decoding, a, b: _opened_groups(kept, stored, levels, decoding, a, b)
    return lambda kept, stored, levels, decoding, a, b: _decoded(
        kept[a:b], stored[a >> len(levels) : b >> len(levels)], levels, decoding
    )


@inner_overload(closed)
def _closed(kept, stored, levels, scale_of, numbers, codes, values, a, b):
    if isinstance(stored, types.NoneType):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: None
    if isinstance(levels, types.NoneType):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: close_whole(
            kept[a:b], scale_of, numbers, codes, values
        )
    if isinstance(stored, types.BaseTuple):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: _closed_groups(
            kept, stored, levels, scale_of, numbers, codes, values, a, b
        )
    if isinstance(numbers, types.NoneType):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: _encode(
            kept[a:b], stored[a >> len(levels) : b >> len(levels)], levels, None, scale_of, None, None, codes, values
        )
    if isinstance(scale_of, types.BaseTuple):
        return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: _encode(
            kept[a:b], stored[a >> len(levels) : b >> len(levels)], levels, scale_of, None, numbers, codes, None, values
        )
    return lambda kept, stored, levels, scale_of, numbers, codes, values, a, b: _encode(
        kept[a:b], stored[a >> len(levels) : b >> len(levels)], levels, None, scale_of, numbers, codes, None, values
    )


def _scales(stored):
    """In kernels: the scales as float32 numbers."""
    raise NotImplementedError


@inner_overload(_scales)
def _scales_overload(stored):
    if stored.dtype == types.float32:
        return lambda stored: stored

    def powers(stored):
        scale = np.empty(stored.size, np.uint32)
        powers_piece(stored, scale)
        return scale.view(np.float32)

    return powers


@inner
def _decoded(kept, stored, levels, decoding):
    values = np.empty(CHUNK, np.uint32)[: kept.size]
    values_piece(kept, _scales(stored), levels, values, decoding)
    return values.view(np.float32)


@inner
def _encode(kept, stored, levels, rule, whole, numbers, codes, cuts, values):
    x = values.view(np.uint32)
    largest = largest_of(x, 0, levels)
    divisor, beside = room(largest.size, whole, stored)
    note(largest, rule, whole, None, None, None, stored, divisor, beside)
    divided(x, divisor, None, None, 0, levels, kept, numbers, codes, cuts, None, None)


@inner
def _opened_groups(kept, stored, levels, decoding, a, b):
    c, d = a >> len(levels), b >> len(levels)
    values = np.empty(CHUNK, np.float32)[: b - a]
    decode_groups(kept[a:b], stored[0][c:d], stored[1][c:d], stored[2][c:d], levels, values, decoding)
    return values


@inner
def _closed_groups(kept, stored, levels, rule, numbers, codes, values, a, b):
    c, d = a >> len(levels), b >> len(levels)
    x = values.view(np.uint32)
    encode_groups(x, stored[0][c:d], stored[1][c:d], stored[2][c:d], levels, kept[a:b], rule, numbers, codes)
