"""Formats that are a list of values: codebooks, and power-of-two scales."""

from dataclasses import dataclass
from math import isfinite, ldexp, nan

from halfstep.errors import FormatError
from halfstep.formats.floating import Format


@dataclass(frozen=True)
class Codebook(Format):
    """A format given by its values: `table[code]`. A number half way between two values is rounded to the lower one.

    Source of the tie rule: bitsandbytes' encoders, which take the upper value where x > cut.
    """

    table: tuple[float, ...]

    ties = "lower"
    high_nibble_first = True

    def __post_init__(self) -> None:
        if len(self.table) not in (4, 8, 16, 32, 64, 128, 256):
            raise FormatError(
                f"codebook {self.name!r} has {len(self.table)} entries; expected a power of two from 4 to 256 "
                "(repeat a value to fill it)"
            )
        if not all(isfinite(v) for v in self.table) or max(self.table) <= 0:
            raise FormatError(f"codebook {self.name!r}: every entry must be finite, and one of them positive")

    @property
    def key(self) -> str:
        return f"codebook {self.table}"

    @property
    def bits(self) -> int:
        return len(self.table).bit_length() - 1

    @property
    def max(self) -> float:
        return max(self.table)

    @property
    def min(self) -> float:
        return min(self.table)

    @property
    def smallest(self) -> float:
        return min(v for v in self.table if v > 0)

    def decode(self, code: int) -> float:
        self.check_code(code)
        return self.table[code]


@dataclass(frozen=True)
class PowerOfTwo(Format):
    """An exponent alone: code e is 2^(e - 127), 255 is NaN. No sign and no zero: x <= 0 becomes NaN.

    Source: OCP Microscaling Formats (MX) 1.0; ties to the upper value as in ml_dtypes.
    """

    key = "exponent"
    bits = 8
    significant_bits = 1
    has_nan = True
    ties = "upper"
    max = ldexp(1, 127)
    min = ldexp(1, -127)
    smallest = min
    overflow_from = ldexp(1.5, 127)

    def decode(self, code: int) -> float:
        self.check_code(code)
        return nan if code == 255 else ldexp(1, code - 127)


float8_e8m0fnu = PowerOfTwo("float8_e8m0fnu", source="OCP Microscaling Formats (MX) 1.0", aliases=("e8m0fnu", "e8m0"))
