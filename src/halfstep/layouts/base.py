"""A layout: the tensors that a quantised matrix has in a file, from codes and scales and back, without rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import LayoutError
from halfstep.formats import Format
from halfstep.layouts.scales import StoredScales
from halfstep.ops import Quantized
from halfstep.quant import Quantizer, Tile, decode, encode
from halfstep.quant import layout as parts_of
from halfstep.quant.pack import pack, unpack


Config = Callable[[Sequence[str]], dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    """How a matrix (out, in) of codes and scales lies in a file: NAME + `codes`, and what `scales` adds to it.

    A layout takes any quantizer whose elements are among its own and whose tiles are whole numbers of its own tiles:
    scales are then repeated, codes written in the layout's elements, and no value changes.
    """

    name: str
    summary: str
    element: Format
    tile: Tile
    scales: StoredScales
    config: Config = field(repr=False)
    """The `quantization_config` of config.json, given the names of the linear layers that are not quantised."""
    codes: str = "weight"
    """What the tensor of codes is called."""
    multiple: tuple[int, int] = (1, 1)
    """Rows and columns of a matrix are multiples of these, or it is left out: what servers' kernels take."""
    static: bool = False
    """Whether the input's factor is in the file too (`input_scale`), instead of being found at every call."""
    rank: int = 0
    """Its place among others that hold the same."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of a matrix's tensors."""
        return (self.codes, *self.scales.layout((1, 1)))

    def refusal(self, quantizer: Quantizer) -> str | None:
        """Why the layout cannot hold what the quantizer makes; None where it can."""
        format, scales = quantizer.format, quantizer.scales
        if format.bits > 8 or not set(format.values()) <= set(self.element.values()):
            return f"values of {format.name} are not all values of {self.element.name}"
        if quantizer.outliers is not None or quantizer.clamp is not None:
            return "it keeps some elements apart from the codes"
        if scales is None:
            return None if self.scales.plain else f"it has no scales, and the layout's are {self.scales.text}"
        if self.scales.way(scales.rule) is None:
            return f"its scales ({scales.rule}) are not {self.scales.text}"
        own, its = (self.tile.rows, self.tile.columns), (scales.tile.rows, scales.tile.columns)
        if not all(_divides(small, large) for small, large in zip(own, its, strict=True)):
            return f"its tile ({scales.tile}) is not made of whole tiles of {self.tile}"
        return None

    def input_refusal(self, quantizer: Quantizer | None) -> str | None:
        """Why a static layout cannot have the input's factor of that quantizer; None where it can."""
        if quantizer is None or quantizer.stateful is None:
            return "no step leaves a factor of the inputs, which are rounded with their own amax or not at all"
        if quantizer.format.key != self.element.key:
            return f"inputs are rounded to {quantizer.format.name}, and servers round them to {self.element.name}"
        return None

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Why a matrix of that shape has no place in the layout; None where it has."""
        rows, columns = self.multiple
        if len(shape) != 2 or shape[0] % rows or shape[1] % columns:
            wanted = f"an input of a multiple of {columns}" + (f" and an output of one of {rows}" if rows > 1 else "")
            return f"its weight is {'x'.join(map(str, shape))}, and {self.name} takes {wanted}"
        return None

    def distance(self, quantizers: Sequence[Quantizer]) -> tuple[bool, bool]:
        """How far quantizers are from the layout: whether codes are rewritten, and scales repeated."""
        scales = [q.scales for q in quantizers]
        return (
            any(q.format.bits != self.element.bits for q in quantizers),
            any(s is None or s.tile != self.tile or self.scales.way(s.rule) != "same" for s in scales),
        )

    def tensors(self, made: Quantized) -> dict[str, Tensor]:
        """The tensors of a quantised matrix by name.

        Raises:
            LayoutError: a scale that is no number, since some of the weights were not finite; or one beyond the
                layout's scales.
        """
        quantizer, (rows, columns) = made.quantizer, made.matrix_shape
        codes = unpack(made.codes, quantizer.format.bits, columns, quantizer.format.high_nibble_first)
        if quantizer.format.key != self.element.key:
            codes = encode(decode(codes, quantizer.format, torch.float32), self.element)
        packed = pack(codes, self.element.bits)
        written = packed.view(torch.float8_e4m3fn) if self.element.bits == 8 else packed
        tile = quantizer.scales.tile if quantizer.scales else Tile(0, 0)
        places = [_finer(*axis) for axis in _axes((rows, columns), tile, self.tile)]
        found = self.scales.tensors(made, lambda grid: grid[places[0]][:, places[1]])
        return {self.codes: written.contiguous(), **{name: tensor.contiguous() for name, tensor in found.items()}}

    def quantized(
        self, tensors: Mapping[str, Tensor], quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype, note: Any
    ) -> Quantized:
        """What `tensors` was given, with the same codes and scales; `note` is what `scales.note` said of it.

        Raises:
            LayoutError: a tensor is missing, or of another dtype or shape than the layout's.
        """
        if (why := self.refusal(quantizer)) is not None:
            raise LayoutError(f"{self.name} does not hold {quantizer.format.name} ({quantizer.scales}): {why}")
        rows, columns = shape
        for name, (kind, size) in self._expected(rows, columns).items():
            found = tensors.get(name)
            if found is None or found.dtype != kind or found.shape != size:
                what = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
                raise LayoutError(f"{name}: {what} found; {self.name} of a {rows}x{columns} matrix has {size} {kind}")
        codes = unpack(tensors[self.codes].view(torch.uint8), self.element.bits, columns)
        if quantizer.format.key != self.element.key:
            codes = encode(decode(codes, self.element, torch.float32), quantizer.format)
        codes = pack(codes, quantizer.format.bits, quantizer.format.high_nibble_first)
        tile = quantizer.scales.tile if quantizer.scales else Tile(0, 0)
        places = [_coarser(*axis) for axis in _axes((rows, columns), tile, self.tile)]
        grid = self.tile.grid(rows, columns)
        scales = self.scales.stored(tensors, quantizer, grid, lambda g: g[places[0]][:, places[1]], note)
        expected = parts_of(quantizer, shape, dtype)
        made = {name: part.to(expected[name][0]) for name, part in {"codes": codes, **scales}.items()}
        return Quantized(quantizer, shape, dtype, made)

    def _expected(self, rows: int, columns: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        eight = self.element.bits == 8
        codes = (torch.float8_e4m3fn, (rows, columns)) if eight else (torch.uint8, (rows, -(-columns // 2)))
        return {self.codes: codes, **self.scales.layout(self.tile.grid(rows, columns))}


def _divides(small: int, large: int) -> bool:
    """Whether one side of a tile, 0 for the whole dimension, is made of whole smaller ones."""
    return not large if not small else large % small == 0


def _axes(sizes: tuple[int, int], theirs: Tile, own: Tile) -> list[tuple[int, int, int]]:
    return list(zip(sizes, (theirs.rows, theirs.columns), (own.rows, own.columns), strict=True))


def _finer(size: int, large: int, small: int) -> Tensor:
    """For each of a dimension's small tiles, the number of the large one that it lies in."""
    return torch.arange(0, size, small or size, dtype=torch.int64, device="cpu") // (large or size)


def _coarser(size: int, large: int, small: int) -> Tensor:
    """For each of a dimension's large tiles, the number of the first small one that lies in it."""
    return torch.arange(0, size, large or size, dtype=torch.int64, device="cpu") // (small or size)
