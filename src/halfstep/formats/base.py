"""What a number format is: which values exist, and what happens beyond the largest."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from halfstep.errors import FormatError


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: a sign, `exponent_bits`, `mantissa_bits`, subnormals.

    With stored exponent e, stored mantissa m, M mantissa bits and bias b, a code stands for

        e = 0:   ± 2^(1 - b) * m / 2^M            (zero and the subnormals)
        e >= 1:  ± 2^(e - b) * (1 + m / 2^M)

    `max` is the largest finite value; codes above it are infinity or NaN, as `has_infinity` says.
    Source: IEEE 754-2019 for the rule; each format names its own.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_infinity: bool
    source: str
    aliases: tuple[str, ...] = ()
    storage_bits: int | None = None
    """Bits a value takes in memory, where that is more than the bits it uses (tf32)."""

    def __post_init__(self) -> None:
        if self.exponent_bits < 2 or self.mantissa_bits < 0 or self.bits > 32:
            raise FormatError(
                f"format {self.name!r}: {self.exponent_bits} exponent and {self.mantissa_bits} mantissa bits "
                "given; a float format here has at least 2 exponent bits and at most 32 bits in all"
            )
        if Fraction(self.max) % Fraction(2) ** (self.max_exponent - self.mantissa_bits):
            raise FormatError(
                f"format {self.name!r}: max {self.max} is no value with {self.mantissa_bits} mantissa bits"
            )

    @property
    def bits(self) -> int:
        """Bits of a value: sign, exponent, mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bytes(self) -> float:
        """Bytes a stored value takes."""
        return (self.storage_bits or self.bits) / 8

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value (and the step of the subnormals, before the mantissa)."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        numerator, denominator = self.max.as_integer_ratio()
        return numerator.bit_length() - denominator.bit_length()

    @property
    def min_normal(self) -> float:
        """The smallest positive normal value."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The gap between 1 and the next value."""
        return 2.0**-self.mantissa_bits

    def values(self) -> Iterator[Fraction]:
        """Every finite value that is not negative, ascending, exactly.

        Raises:
            FormatError: the format has more than 16 bits; listing it would take minutes.
        """
        if self.bits > 16:
            raise FormatError(f"{self.name} has {self.bits} bits; values() lists formats of at most 16")
        top, scale = Fraction(self.max), 2**self.mantissa_bits
        for code in range(2 ** (self.bits - 1)):
            exponent, mantissa = divmod(code, scale)
            significand = Fraction(mantissa + (scale if exponent else 0), scale)
            value = significand * Fraction(2) ** (max(exponent, 1) - self.bias)
            if value > top:
                return
            yield value


def ieee(
    name: str, exponent_bits: int, mantissa_bits: int, source: str, aliases: tuple[str, ...] = (), **more: int
) -> Format:
    """An IEEE-style format: bias 2^(E-1) - 1, the top exponent kept for infinity and NaN.

    >>> ieee("e8m3", 8, 3, "made up").eps
    0.125
    """
    bias = 2 ** (exponent_bits - 1) - 1
    largest = (2 - 2.0**-mantissa_bits) * 2.0**bias
    return Format(name, exponent_bits, mantissa_bits, bias, largest, True, source, aliases, **more)
