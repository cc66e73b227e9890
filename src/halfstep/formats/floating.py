"""Binary floating point with any split of the bits, in the four conventions for what the last codes mean."""

from dataclasses import dataclass
from functools import cached_property
from math import frexp, inf, ldexp, nan

from halfstep.errors import FormatError, one_of
from halfstep.formats.base import Format


SPECIALS = ("ieee", "fn", "fnuz", "finite")


@dataclass(frozen=True)
class Float(Format):
    """A sign, `exponent_bits` with a bias, `mantissa_bits`, subnormals.

    With stored exponent e, stored mantissa m, M mantissa bits and bias b, a code stands for

        e = 0:   ± 2^(1 - b) * m / 2^M            (zero and the subnormals)
        e >= 1:  ± 2^(e - b) * (1 + m / 2^M)

    except for the codes that `specials` keeps:

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
    """Bits of the container, where that is wider than the format needs (tf32)."""

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
        # Asked at every product, in traced graphs too.
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
        """The exponent of the smallest normal value (and the step of the subnormals, before the mantissa)."""
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
        exponent = code >> self.mantissa_bits & ((1 << self.exponent_bits) - 1)
        return code >> (self.bits - 1), exponent, mantissa

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
    """An IEEE-style format: bias 2^(E-1) - 1, the top exponent kept for infinity and NaN.

    >>> ieee("e8m3", 8, 3, "made up").eps
    0.125
    """
    bias = 2 ** (exponent_bits - 1) - 1
    return Float(
        name, exponent_bits, mantissa_bits, bias, container_bits=container_bits, source=source, aliases=aliases
    )
