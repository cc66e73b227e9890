"""Posits: floating-point formats whose exponent takes more bits the further it is from zero."""

from dataclasses import dataclass
from math import ldexp, nan

from halfstep.errors import FormatError
from halfstep.formats.floating import Format


@dataclass(frozen=True)
class Posit(Format):
    """An n-bit posit with `es` exponent bits.

    After the sign comes the regime, a run of k equal bits (r = k - 1 for ones, -k for zeros) and the bit that ends it;
    then `es` exponent bits e (bits beyond the word read as 0) and the fraction f: ± (1 + f) * 2^(r * 2^es + e). A
    negative number is the two's complement of its magnitude; 10...0 is NaR ("not a real", NaN here); there is no
    infinity.

    Rounding to nearest happens on the bit string: a boundary is the posit with one bit more that lies between two
    codes, which is not half way where the cut falls into the exponent or the regime. Nothing rounds to zero or to NaR.

    Source: Posit Standard 2022, as implemented by stillwater-sc/universal.
    """

    width: int
    es: int

    has_nan = True

    def __post_init__(self) -> None:
        if not (2 <= self.width <= 32 and 0 <= self.es <= 5):
            raise FormatError(f"posit({self.width}, {self.es}) asked for; expected 2 to 32 bits and es from 0 to 5")

    @property
    def key(self) -> str:
        return f"posit {self.width} {self.es}"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def significant_bits(self) -> int:
        return max(self.width - 2 - self.es, 1)  # without the sign and the shortest regime (2 bits)

    @property
    def max(self) -> float:
        return ldexp(1, (self.width - 2) << self.es)

    @property
    def min(self) -> float:
        return -self.max

    @property
    def smallest(self) -> float:
        return 1 / self.max

    @property
    def eps(self) -> float | None:
        return _magnitude((1 << self.width - 2) + 1, self.width, self.es) - 1 if self.width > 2 else None

    def decode(self, code: int) -> float:
        self.check_code(code)
        sign = code >> (self.width - 1)
        if code == sign << (self.width - 1):
            return nan if sign else 0.0
        return (
            -_magnitude((1 << self.width) - code, self.width, self.es)
            if sign
            else _magnitude(code, self.width, self.es)
        )

    def boundaries(self) -> tuple[float, ...]:
        between = [_magnitude(2 * code + 1, self.width + 1, self.es) for code in range(1, (1 << (self.width - 1)) - 1)]
        return (*(-b for b in reversed(between)), 0.0, 0.0, *between)


def _magnitude(code: int, width: int, es: int) -> float:
    """The value of a positive code."""
    _, regime, power, fraction = parts(f"{code:0{width - 1}b}", es)
    exponent = int(power.ljust(es, "0") or "0", 2)
    return ldexp((1 << len(fraction)) + int(fraction or "0", 2), (regime << es) + exponent - len(fraction))


def parts(body: str, es: int) -> tuple[str, int, str, str]:
    """The bits of a positive code after the sign: the regime's bits, its value, the exponent bits that fit in the word,
    the fraction.

    >>> parts("1001101", 2)
    ('10', 0, '01', '101')
    """
    run = len(body) - len(body.lstrip(body[0]))
    rest = body[run + 1 :]
    return body[: run + 1], run - 1 if body[0] == "1" else -run, rest[:es], rest[es:]


def posit(width: int, es: int) -> Posit:
    """The posit format with that many bits and exponent bits.

    >>> posit(8, 2).decode(0x4D)
    3.25
    """
    return Posit(f"posit{width}_{es}", width, es, source="Posit Standard 2022 (es is 2 there, others before it)")


posit8_0 = posit(8, 0)
posit8_1 = posit(8, 1)
posit8_2 = posit(8, 2)
posit16_1 = posit(16, 1)
posit16_2 = posit(16, 2)
posit32_2 = posit(32, 2)
