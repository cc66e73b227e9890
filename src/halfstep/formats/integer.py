"""Integer formats: integers, or multiples of a power of two."""

from dataclasses import dataclass
from math import ldexp

from halfstep.errors import FormatError
from halfstep.formats.floating import Format


@dataclass(frozen=True)
class Integer(Format):
    """n / 2^fraction_bits for n from `low` to `high`: two's complement, or unsigned where `low` is 0.

    Only these are `values()`, and results of rounding; a code below `low` (-128 of a symmetric int8) still decodes.
    """

    low: int
    high: int
    fraction_bits: int = 0

    def __post_init__(self) -> None:
        if not self.low <= 0 < self.high < 2**15 or self.low < -self.high - 1:
            raise FormatError(
                f"format {self.name!r}: range {self.low} to {self.high} given; expected low <= 0 < high < 2^15, "
                "and no more negative numbers than two's complement has"
            )

    @property
    def key(self) -> str:
        return f"integer {self.low} {self.high} {self.fraction_bits}"

    @property
    def bits(self) -> int:
        return self.high.bit_length() + (self.low < 0)

    @property
    def significant_bits(self) -> int:
        return max(self.high, -self.low - 1).bit_length()  # low may be -2^n, which has one significant bit

    @property
    def max(self) -> float:
        return ldexp(self.high, -self.fraction_bits)

    @property
    def min(self) -> float:
        return ldexp(self.low, -self.fraction_bits)

    @property
    def smallest(self) -> float:
        return ldexp(1, -self.fraction_bits)

    def values(self) -> tuple[float, ...]:
        return tuple(ldexp(n, -self.fraction_bits) for n in range(self.low, self.high + 1))

    def decode(self, code: int) -> float:
        self.check_code(code)
        return ldexp(code - (1 << self.bits if (self.low < 0 and code >> (self.bits - 1)) else 0), -self.fraction_bits)


_SYMMETRIC = "Dettmers et al. 2022, arXiv 2208.07339, section 2.1: absmax quantisation uses -127 to 127"

int8 = Integer("int8", -127, 127, source=_SYMMETRIC)
int4 = Integer("int4", -7, 7, source="the same with 4 bits")
uint8 = Integer("uint8", 0, 255, source="affine (zero-point) quantisation in 8 bits")
uint4 = Integer("uint4", 0, 15, source="affine (zero-point) quantisation in 4 bits")
ocp_int8 = Integer(
    "ocp_int8", -127, 127, 6, source="OCP Microscaling Formats (MX) 1.0: INT8 with an implied scale of 2^-6"
)
