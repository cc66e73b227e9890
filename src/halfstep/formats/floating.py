"""The interface of number formats, and the binary floating-point formats."""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import frexp, inf, isfinite, ldexp, nan, prod
from typing import ClassVar

from halfstep.errors import FormatError, one_of


@dataclass(frozen=True)
class Format(ABC):
    """A scalar number format. Each kind (`Float`, `Integer`, `Posit`, `Codebook`, ...) defines how codes are decoded.

    Every value of every format here is exact in a Python float.
    """

    name: str
    source: str = field(kw_only=True)
    aliases: tuple[str, ...] = field(default=(), kw_only=True)

    has_infinity: ClassVar[bool] = False
    """Whether some codes are infinities."""
    has_nan: ClassVar[bool] = False
    """Whether some code is NaN."""
    has_negative_zero: ClassVar[bool] = False
    """Whether -0 has a code of its own."""
    overflow_from: ClassVar[float] = inf
    """For a listed format with NaN but no infinity: numbers from here on round to NaN unless saturated."""
    ties: ClassVar[str] = "even"
    """How ties are rounded to nearest: to the `even` code, to the `lower` or to the `upper` value."""
    high_nibble_first: ClassVar[bool] = False
    """Whether the first of two packed 4-bit codes is in the high half of the byte."""

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
        """Bits that hold the significand of every value; float64's 53 where values are arbitrary."""
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
        """Bytes per stored value: 4- and 6-bit codes are packed, others fill their container."""
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
        """The parameters of the format, without its name and source, as text for `formats.from_key`."""

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
        """The boundaries between `values()[i]` and `values()[i + 1]` in rounding to nearest: half way (at most 16
        bits)."""
        return tuple((low + high) / 2 for low, high in itertools.pairwise(self.values()))

    def check_code(self, code: int) -> None:
        """Raise FormatError unless `code` is in [0, 2^bits)."""
        if not 0 <= code < 1 << self.bits:
            raise FormatError(f"{self.name} has codes 0 to {(1 << self.bits) - 1:#x}; got {code:#x}")


@cache
def _values(format: Format) -> tuple[float, ...]:
    return tuple(sorted({v + 0.0 for v in map(format.decode, format.codes()) if isfinite(v)}))


@dataclass(frozen=True)
class BlockFormat:
    """Elements of a scalar format in tiles of (rows, columns) that share a scale; 0 stands for the whole dimension.

    `rules` are the names of the scale rules that the format supports, the default first. Values are always elements
    times their scale.
    """

    name: str
    element: Format
    tile: tuple[int, int]
    rules: tuple[str, ...]
    scale_bits: float
    """Bits of the scales of one tile (without those of the whole tensor)."""
    source: str
    aliases: tuple[str, ...] = ()
    outliers: float | None = None
    """Columns with a magnitude of at least this are kept apart, unquantized."""

    def __post_init__(self) -> None:
        if len(self.tile) != 2 or min(self.tile) < 0:
            raise FormatError(
                f"block format {self.name!r}: tile {self.tile}; expected (rows, columns), 0 for a whole dimension"
            )

    @property
    def bits(self) -> float:
        """Bits per value, scales included where the size of a tile is known."""
        return self.element.bits + (self.scale_bits / prod(self.tile) if prod(self.tile) else 0)


SPECIALS = ("ieee", "fn", "fnuz", "finite")


@dataclass(frozen=True)
class Float(Format):
    """A float format: a sign, `exponent_bits` with a bias, `mantissa_bits`, subnormals.

    With stored exponent e, stored mantissa m, M mantissa bits and bias b, the value of a code is

        e = 0:   ± 2^(1 - b) * m / 2^M            (zero and the subnormals)
        e >= 1:  ± 2^(e - b) * (1 + m / 2^M)

    except for the codes reserved by `specials`:

        ieee     the top exponent holds the infinities and NaNs
        fn       finite, NaN only where all bits of exponent and mantissa are one
        fnuz     finite, unsigned zero: the code of -0 is the one NaN
        finite   every code is a number

    Source: IEEE 754-2019 for the rule, OCP OFP8 1.0 and MX 1.0 for fn and finite; each format names its own.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "ieee"
    container_bits: int | None = None
    """Bits of the container, where it is wider than the format needs (tf32)."""

    def __post_init__(self) -> None:
        one_of("specials", self.specials, SPECIALS, FormatError)
        if not 2 <= self.exponent_bits <= 10 or self.mantissa_bits < 0 or self.bits > 32:
            raise FormatError(
                f"format {self.name!r}: {self.exponent_bits} exponent and {self.mantissa_bits} mantissa bits given; "
                "a float format has 2 to 10 exponent bits and at most 32 bits in all"
            )
        if self.specials == "fn" and self.mantissa_bits == 0:
            raise FormatError(f"format {self.name!r}: without mantissa bits 'fn' has no code for its NaN; use 'finite'")
        if not -100 <= self.bias - 2 ** (self.exponent_bits - 1) <= 100:
            raise FormatError(f"format {self.name!r}: bias {self.bias} is more than 100 from the IEEE one")
        # Cached now, since traced graphs read them at every matmul and cannot fill a cached property.
        _ = self.key, self.significant_bits, self.max, self.smallest, self.storage_bits

    @cached_property
    def key(self) -> str:
        return f"float {self.exponent_bits} {self.mantissa_bits} {self.bias} {self.specials}"

    @cached_property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def significant_bits(self) -> int:
        return 1 + self.mantissa_bits

    @cached_property
    def storage_bits(self) -> int:
        return self.container_bits or (8 if self.bits <= 8 else 16 if self.bits <= 16 else 32)

    @property
    def has_infinity(self) -> bool:  # type: ignore[override]
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:  # type: ignore[override]
        return self.specials == "fnuz" or self.specials == "fn" or (self.specials == "ieee" and self.mantissa_bits > 0)

    @property
    def has_negative_zero(self) -> bool:  # type: ignore[override]
        return self.specials != "fnuz"

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value and of the subnormals."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        return frexp(self.max)[1] - 1

    @cached_property
    def max(self) -> float:
        steps = 2 ** (self.mantissa_bits + 1) - (2 if self.specials == "fn" else 1)
        top = 2**self.exponent_bits - (2 if self.specials == "ieee" else 1)
        return ldexp(steps, top - self.bias - self.mantissa_bits)

    @property
    def min(self) -> float:
        return -self.max

    @property
    def min_normal(self) -> float:
        """The smallest positive normal value."""
        return ldexp(1, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value."""
        return ldexp(1, self.min_exponent - self.mantissa_bits)

    @cached_property
    def smallest(self) -> float:
        return self.min_subnormal

    @property
    def eps(self) -> float:
        return ldexp(1, -self.mantissa_bits)

    def fields(self, code: int) -> tuple[int, int, int]:
        """Sign, stored exponent and stored mantissa of a code."""
        self.check_code(code)
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        return code >> (self.bits - 1), code >> self.mantissa_bits & ((1 << self.exponent_bits) - 1), mantissa

    def decode(self, code: int) -> float:
        sign, exponent, mantissa = self.fields(code)
        last = (1 << self.exponent_bits) - 1
        if self.specials == "ieee" and exponent == last:
            return nan if mantissa else -inf if sign else inf
        if self.specials == "fn" and exponent == last and mantissa == (1 << self.mantissa_bits) - 1:
            return nan
        if self.specials == "fnuz" and code == 1 << (self.bits - 1):
            return nan
        steps = mantissa + (1 << self.mantissa_bits if exponent else 0)
        value = ldexp(steps, max(exponent, 1) - self.bias - self.mantissa_bits)
        return -value if sign else value


def ieee(
    name: str,
    exponent_bits: int,
    mantissa_bits: int,
    source: str,
    aliases: tuple[str, ...] = (),
    container_bits: int | None = None,
) -> Float:
    """An IEEE-style format: bias 2^(E-1) - 1, the top exponent reserved for infinity and NaN.

    >>> ieee("e8m3", 8, 3, "made up").eps
    0.125
    """
    return Float(
        name,
        exponent_bits,
        mantissa_bits,
        2 ** (exponent_bits - 1) - 1,
        container_bits=container_bits,
        source=source,
        aliases=aliases,
    )
