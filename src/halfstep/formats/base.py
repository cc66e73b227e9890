"""What a number format is: a finite set of values, each with a code, and where rounding turns; and a block format."""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import inf, isfinite, prod
from typing import ClassVar

from halfstep.errors import FormatError


@dataclass(frozen=True)
class Format(ABC):
    """A scalar number format. Each kind (`Float`, `Integer`, `Posit`, `Codebook`, ...) says how a code is read.

    Every value of every format here is exact in a Python float.
    """

    name: str
    source: str = field(kw_only=True)
    aliases: tuple[str, ...] = field(default=(), kw_only=True)

    has_infinity: ClassVar[bool] = False
    """Whether codes stand for infinities."""
    has_nan: ClassVar[bool] = False
    """Whether a code stands for NaN."""
    has_negative_zero: ClassVar[bool] = False
    """Whether -0 has a code of its own."""
    overflow_from: ClassVar[float] = inf
    """Of a listed format with NaN but no infinity: numbers from here on round to NaN unless saturated."""
    ties: ClassVar[str] = "even"
    """Where a number on a boundary goes when rounded to nearest: to the `even` code, the `lower` or `upper` value."""
    high_nibble_first: ClassVar[bool] = False
    """Which half of a byte the first of two packed 4-bit codes takes."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code."""

    @property
    @abstractmethod
    def max(self) -> float:
        """The largest finite value."""

    @property
    @abstractmethod
    def min(self) -> float:
        """The most negative value; the smallest one where the format has no sign."""

    @property
    @abstractmethod
    def smallest(self) -> float:
        """The smallest positive value."""

    @abstractmethod
    def decode(self, code: int) -> float:
        """The value of a code, exactly: a number, -0.0, an infinity or NaN.

        Raises:
            FormatError: the code is not in [0, 2^bits).
        """

    @property
    def significant_bits(self) -> int:
        """Bits that hold the significand of every value; a float64's where values are any numbers."""
        return 53

    @property
    def signed(self) -> bool:
        """Whether there are negative values."""
        return self.min < 0

    @cached_property
    def storage_bits(self) -> int:
        """Bits of the container of one unpacked code: 8, 16 or 32."""
        return 8 if self.bits <= 8 else 16 if self.bits <= 16 else 32

    @property
    def bytes(self) -> float:
        """Bytes a stored value takes: 4- and 6-bit codes are packed, others fill their container."""
        return (self.bits if self.bits in (4, 6) else self.storage_bits) / 8

    @property
    def eps(self) -> float | None:
        """The gap between 1 and the next value; None where 1 is not a value, or is the largest."""
        values = self.values()
        after = [v for v in values if v > 1.0]
        return after[0] - 1.0 if after and 1.0 in values else None

    @property
    @abstractmethod
    def key(self) -> str:
        """The numbers that make the format, as text for `formats.from_key`: without its name and source."""

    def codes(self) -> range:
        """All codes.

        Raises:
            FormatError: the format has more than 16 bits; listing it would take minutes.
        """
        if self.bits > 16:
            raise FormatError(f"{self.name} has {self.bits} bits; only formats of at most 16 are listed code by code")
        return range(1 << self.bits)

    def values(self) -> tuple[float, ...]:
        """The distinct finite values, ascending (at most 16 bits)."""
        return _values(self)

    def boundaries(self) -> tuple[float, ...]:
        """Where rounding to nearest turns from `values()[i]` to `values()[i + 1]`: half way (at most 16 bits)."""
        values = self.values()
        return tuple((low + high) / 2 for low, high in itertools.pairwise(values))

    def check_code(self, code: int) -> None:
        """Raise FormatError unless `code` is in [0, 2^bits)."""
        if not 0 <= code < 1 << self.bits:
            raise FormatError(f"{self.name} has codes 0 to {(1 << self.bits) - 1:#x}; got {code:#x}")


@cache
def _values(format: Format) -> tuple[float, ...]:
    return tuple(sorted({v + 0.0 for v in map(format.decode, format.codes()) if isfinite(v)}))


@dataclass(frozen=True)
class BlockFormat:
    """Elements of `element`, in tiles of (rows, columns) that share a scale; 0 stands for the whole dimension.

    `rules` are the ways to choose the scale that the format admits, by name, the usual one first. A scale is always
    multiplied to get back to the tensor.
    """

    name: str
    element: Format
    tile: tuple[int, int]
    rules: tuple[str, ...]
    scale_bits: float
    """Bits of the scales of one tile (those of the whole tensor left out)."""
    source: str
    aliases: tuple[str, ...] = ()
    outliers: float | None = None
    """Columns with a magnitude of at least this are kept apart, as they are."""

    def __post_init__(self) -> None:
        if len(self.tile) != 2 or min(self.tile) < 0:
            raise FormatError(
                f"block format {self.name!r}: tile {self.tile}; expected (rows, columns), 0 for a whole dimension"
            )

    @property
    def bits(self) -> float:
        """Bits per value, scales included where the size of a tile is known."""
        return self.element.bits + (self.scale_bits / prod(self.tile) if prod(self.tile) else 0)
