"""A layout: the tensors that a quantised matrix has in a file, from codes and back; how its scales are stored."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import LayoutError
from halfstep.formats import Format
from halfstep.ops import Quantized
from halfstep.quant import Quantizer, Scaling, Tile, decode, encode, layout as parts_of
from halfstep.quant.cast import pack, unpack
from halfstep.quant.family import power_of_two


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
    scales: "StoredScales"
    config: Callable[[Sequence[str]], dict[str, Any]] = field(repr=False)
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
        # Of a side of a tile 0 stands for the whole dimension.
        if not all(not large if not small else large % small == 0 for small, large in zip(own, its, strict=True)):
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
        return (
            any(q.format.bits != self.element.bits for q in quantizers),
            any(
                s is None or s.tile != self.tile or self.scales.way(s.rule) != "same"
                for s in (q.scales for q in quantizers)
            ),
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
        places = [_finer(*axis) for axis in self._axes((rows, columns), quantizer)]
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
        at, across = (_coarser(*axis) for axis in self._axes((rows, columns), quantizer))
        grid, expected = self.tile.grid(rows, columns), parts_of(quantizer, shape, dtype)
        scales = self.scales.stored(tensors, quantizer, grid, lambda g: g[at][:, across], note)
        made = {name: part.to(expected[name][0]) for name, part in {"codes": codes, **scales}.items()}
        return Quantized(quantizer, shape, dtype, made)

    def _expected(self, rows: int, columns: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        eight, four = (torch.float8_e4m3fn, (rows, columns)), (torch.uint8, (rows, -(-columns // 2)))
        return {
            self.codes: eight if self.element.bits == 8 else four,
            **self.scales.layout(self.tile.grid(rows, columns)),
        }

    def _axes(self, sizes: tuple[int, int], quantizer: Quantizer) -> list[tuple[int, int, int]]:
        """Of each dimension its size, and the sides of the quantizer's tiles and of the layout's."""
        theirs = quantizer.scales.tile if quantizer.scales else Tile(0, 0)
        return list(zip(sizes, (theirs.rows, theirs.columns), (self.tile.rows, self.tile.columns), strict=True))


def _finer(size: int, large: int, small: int) -> Tensor:
    """For each of a dimension's small tiles, the number of the large one that it lies in."""
    return torch.arange(0, size, small or size, dtype=torch.int64, device="cpu") // (large or size)


def _coarser(size: int, large: int, small: int) -> Tensor:
    """For each of a dimension's large tiles, the number of the first small one that lies in it."""
    return torch.arange(0, size, large or size, dtype=torch.int64, device="cpu") // (small or size)


Move = Callable[[Tensor], Tensor]
"""From a grid of scales, an entry a tile, to that of larger or smaller tiles."""
Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class StoredScales(ABC):
    """One way of storing scales."""

    text: str
    """What they are, in words."""
    plain: bool = False
    """Whether they hold 1, for codes without scales."""

    @abstractmethod
    def way(self, rule: Scaling) -> str | None:
        """How the rule's scales are stored so: the `same`, as the rule stores them, or in `other` numbers in which each
        is found again. None where some cannot be."""

    @abstractmethod
    def tensors(self, made: Quantized, move: Move) -> dict[str, Tensor]:
        """The tensors in the file, by name."""

    @abstractmethod
    def stored(
        self, tensors: Mapping[str, Tensor], quantizer: Quantizer, grid: tuple[int, int], move: Move, note: Any
    ) -> dict[str, Tensor]:
        """What a `Quantized` of that quantizer keeps beside its codes, from the tensors of such a grid."""

    @abstractmethod
    def layout(self, grid: tuple[int, int]) -> Sizes:
        """Name, dtype and shape of the tensors for that grid of tiles."""

    def note(self, made: Quantized) -> Any:
        """What else has to be kept to find the scales in the file again; None where nothing has."""
        return None


@dataclass(frozen=True)
class Float32(StoredScales):
    """Float32 numbers that codes are multiplied by."""

    name: str = "weight_scale"
    flat: bool = False
    """Whether there is one, in a tensor of one dimension."""

    text = "float32 numbers, one a tile"
    plain = True

    def way(self, rule: Scaling) -> str | None:
        alone = rule.linear and rule.layout((1, 1)).keys() == {"scale"}
        if not alone or not (rule.exact or rule.holds in ("float32", "bf16")):
            return None
        return "same" if rule.holds == "float32" else "other"

    def tensors(self, made: Quantized, move: Move) -> dict[str, Tensor]:
        moved = move(_grid(made))
        return {self.name: moved.view(1) if self.flat else moved}

    def stored(
        self, tensors: Mapping[str, Tensor], quantizer: Quantizer, grid: tuple[int, int], move: Move, note: Any
    ) -> dict[str, Tensor]:
        if quantizer.scales is None:
            return {}
        scale = move(tensors[self.name].view(grid))
        held = quantizer.scales.rule.layout((1, 1))["scale"][0]
        return {"scale": _exponents(scale) if held == torch.uint8 else scale.to(held)}

    def layout(self, grid: tuple[int, int]) -> Sizes:
        return {self.name: (torch.float32, (1,) if self.flat else grid)}


@dataclass(frozen=True)
class Exponents(StoredScales):
    """Powers of two 2^k as bytes k + 127 (E8M0)."""

    name: str = "weight_scale"

    text = "powers of two, one a tile"
    plain = True

    def way(self, rule: Scaling) -> str | None:
        if not rule.exact or rule.layout((1, 1)).keys() != {"scale"}:
            return None
        return "same" if rule.holds == "float8_e8m0fnu" else "other"

    def tensors(self, made: Quantized, move: Move) -> dict[str, Tensor]:
        return {self.name: move(_exponents(_grid(made)))}

    def stored(
        self, tensors: Mapping[str, Tensor], quantizer: Quantizer, grid: tuple[int, int], move: Move, note: Any
    ) -> dict[str, Tensor]:
        if quantizer.scales is None:
            return {}
        byte = move(tensors[self.name])
        held = quantizer.scales.rule.layout((1, 1))["scale"][0]
        return {"scale": byte if held == torch.uint8 else power_of_two(byte.long() - 127).float()}

    def layout(self, grid: tuple[int, int]) -> Sizes:
        return {self.name: (torch.uint8, grid)}


@dataclass(frozen=True)
class TwoLevels(StoredScales):
    """E4M3 numbers, one a tile, divided by one float32 number of the tensor, which is stored as its reciprocal."""

    text = "E4M3 numbers beside one of the tensor"

    def way(self, rule: Scaling) -> str | None:
        return "same" if rule.two_level else None

    def tensors(self, made: Quantized, move: Move) -> dict[str, Tensor]:
        _finite(made.tensors["tensor_scale"])
        bytes_ = move(made.tensors["scale"])
        if bool(((bytes_ & 127) == 127).any()):
            raise _lost()
        return {
            "weight_scale": bytes_.view(torch.float8_e4m3fn),
            "weight_global_scale": _finite(made.tensors["tensor_scale"].reciprocal()).view(1),
        }

    def stored(
        self, tensors: Mapping[str, Tensor], quantizer: Quantizer, grid: tuple[int, int], move: Move, note: Any
    ) -> dict[str, Tensor]:
        if not isinstance(note, str):
            raise LayoutError(f"the tensor's scale is noted as {note!r}; expected a hexadecimal number such as 0x1p-9")
        scale = torch.tensor(float.fromhex(note), dtype=torch.float32, device="cpu")
        stored = tensors["weight_global_scale"].view(())
        if not torch.equal(scale.reciprocal(), stored):
            raise LayoutError(
                f"weight_global_scale is {float(stored)} and the tensor's scale {float(scale)}; expected one to be the "
                "reciprocal of the other: one of the two was edited"
            )
        return {"scale": move(tensors["weight_scale"].view(torch.uint8)), "tensor_scale": scale}

    def layout(self, grid: tuple[int, int]) -> Sizes:
        return {"weight_scale": (torch.float8_e4m3fn, grid), "weight_global_scale": (torch.float32, (1,))}

    def note(self, made: Quantized) -> str:
        """The tensor's own scale: the reciprocal of its reciprocal may be another number."""
        return float(made.tensors["tensor_scale"]).hex()


def _exponents(scale: Tensor) -> Tensor:
    """The bytes of powers of two.

    Raises:
        LayoutError: one is no power of two from 2^-127 to 2^127.
    """
    fraction, power = torch.frexp(scale.double())  # float32's own subnormal numbers are normal ones here
    if bool((fraction != 0.5).any()) or bool(((power < -126) | (power > 128)).any()):
        raise LayoutError("a scale is no power of two from 2^-127 to 2^127; expected powers of two, as the layout has")
    return (power + 126).to(torch.uint8)


def _grid(made: Quantized) -> Tensor:
    """What the codes of each tile are multiplied by, in float32."""
    scales = made.quantizer.scales
    if scales is None:
        return torch.ones(1, 1, dtype=torch.float32, device="cpu")
    return _finite(scales.rule.multiplier(made.tensors, made.quantizer.format).float())


def _finite(scale: Tensor) -> Tensor:
    if not bool(scale.isfinite().all()):
        raise _lost()
    return scale


def _lost() -> LayoutError:
    return LayoutError("a scale is no finite number, since a weight was not; train again from the last finite weights")
