"""Every named scalar format from its definition: decoded values, rounding boundaries (cuts), and rounding by search.

Nothing here reads halfstep: parameters, tables and rules are written a second time, from the standards. Values and cuts
are computed as fractions and stored as float64, exactly (checked when a table is built). Formats of more than 16 bits
are not listed: `Wide` and `WidePosit` round one value at a time, in fractions."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np


MODES = ("nearest_even", "nearest_away", "nearest_up", "toward_zero", "up", "down")
OVERFLOWS = ("saturate", "ieee")

# name: exponent bits, mantissa bits, bias, which codes are NaN or infinity
FLOATS = {
    "fp32": (8, 23, 127, "ieee"),
    "tf32": (8, 10, 127, "ieee"),
    "fp16": (5, 10, 15, "ieee"),
    "bf16": (8, 7, 127, "ieee"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fn": (4, 3, 7, "all ones"),
    "float8_e4m3": (4, 3, 7, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "minus zero"),
    "float8_e4m3fnuz": (4, 3, 8, "minus zero"),
    "float8_e4m3b11fnuz": (4, 3, 11, "minus zero"),
    "float8_e3m4": (3, 4, 3, "ieee"),
    "float6_e3m2fn": (3, 2, 3, "none"),
    "float6_e2m3fn": (2, 3, 1, "none"),
    "float4_e2m1fn": (2, 1, 1, "none"),
}
# name: lowest and highest integer, steps per 1
INTEGERS = {
    "int8": (-127, 127, 1),
    "int4": (-7, 7, 1),
    "uint8": (0, 255, 1),
    "uint4": (0, 15, 1),
    "ocp_int8": (-127, 127, 64),
}
POSITS = {"posit8_0": (8, 0), "posit8_1": (8, 1), "posit8_2": (8, 2), "posit16_1": (16, 1), "posit16_2": (16, 2)}
WIDE_POSITS = {"posit32_2": (32, 2)}
NF4 = """
    -1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
    -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1
"""
AF4 = """
    -1 -.69441008 -.51243739 -.3736951 -.25607552 -.14982478 -.04934812 0
    .04273164 .12934483 .21961274 .31675666 .42563882 .55496234 .72424863 1
"""
FP4_TWELFTHS = "0 .0625 8 12 4 6 2 3"
CODEBOOKS = ("nf4", "bnb_fp4", "af4", "dynamic8", "dynamic8_unsigned")
LISTED = [
    *(name for name in FLOATS if name not in ("fp32", "tf32")),
    "float8_e8m0fnu",
    *INTEGERS,
    *POSITS,
    *CODEBOOKS,
]  # at most 16 bits
WIDE = ["fp32", "tf32", *WIDE_POSITS]
NAMES = [*LISTED, *WIDE]


def exact_float(value: Fraction) -> float:
    """A fraction as float64; asserts that this is exact."""
    result = float(value)
    assert result.as_integer_ratio() == value.as_integer_ratio()
    return result


def times_power_of_two(whole: int, power: int) -> Fraction:
    """whole * 2^power."""
    return Fraction(whole << power) if power >= 0 else Fraction(whole, 1 << -power)


def float_code(code: int, exponent_bits: int, mantissa_bits: int, bias: int, specials: str) -> float:
    """The value of a code by sign, exponent and mantissa."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    stored_exponent = code // 2**mantissa_bits % 2**exponent_bits
    stored_mantissa = code % 2**mantissa_bits
    if specials == "ieee" and stored_exponent == 2**exponent_bits - 1:
        return math.nan if stored_mantissa else sign * math.inf
    if (
        specials == "all ones"
        and code % 2 ** (exponent_bits + mantissa_bits) == 2 ** (exponent_bits + mantissa_bits) - 1
    ):
        return math.nan
    if specials == "minus zero" and code == 2 ** (exponent_bits + mantissa_bits):
        return math.nan
    if stored_exponent == 0:
        magnitude = times_power_of_two(stored_mantissa, 1 - bias - mantissa_bits)
    else:
        magnitude = times_power_of_two(2**mantissa_bits + stored_mantissa, stored_exponent - bias - mantissa_bits)
    return math.copysign(exact_float(magnitude), sign)


def posit_by_magnitude(code: int, bits: int, es: int) -> Fraction | None:
    """Method A: two's complement of a negative code, then regime, exponent and fraction; None for NaR."""
    if code in (0, 2 ** (bits - 1)):
        return None if code else Fraction(0)
    negative = code >= 2 ** (bits - 1)
    word = 2**bits - code if negative else code
    position = bits - 2
    first = word >> position & 1
    run = 0
    while position >= 0 and word >> position & 1 == first:
        run += 1
        position -= 1
    regime = run - 1 if first else -run
    position -= 1  # the bit that terminates the regime
    exponent = 0
    for _ in range(es):
        exponent = 2 * exponent + (word >> position & 1 if position >= 0 else 0)
        position -= 1
    left = max(position + 1, 0)
    value = times_power_of_two(2**left + word % 2**left, regime * 2**es + exponent - left)
    return -value if negative else value


def posit_closed_form(code: int, bits: int, es: int) -> Fraction | None:
    """Method B, of the 2022 standard, on the plain bits: ((1 - 3s) + f) * 2^((1 - 2s) (r 2^es + e + s))."""
    if code in (0, 2 ** (bits - 1)):
        return None if code else Fraction(0)
    text = format(code, f"0{bits}b")
    s, body = int(text[0]), text[1:]
    run = len(body) - len(body.lstrip(body[0]))
    regime = run - 1 if body[0] == "1" else -run
    rest = body[run + 1 :] + "0" * es
    e, fraction = int(rest[:es] or "0", 2), rest[es:]
    steps = len(fraction)  # f is an integer number of steps of 2^-steps
    whole = (1 - 3 * s) * 2**steps + int(fraction or "0", 2)
    return times_power_of_two(whole, (1 - 2 * s) * (regime * 2**es + e + s) - steps)


def float32(value: Fraction) -> float:
    """The float32 nearest to a fraction (ties to even); the result must be normal."""
    if value == 0:
        return 0.0
    exponent = 0
    while abs(value) / Fraction(2) ** exponent >= 2:
        exponent += 1
    while abs(value) / Fraction(2) ** exponent < 1:
        exponent -= 1
    step = Fraction(2) ** (exponent - 23)
    return exact_float(round(value / step) * step)


def dynamic_map(signed: bool) -> list[float]:
    """The 8-bit dynamic map: 0, 1, and in the n-th of 7 decades the midpoints of 2^n (or 2^(n+1)) parts of [0.1, 1].

    Source: arXiv 2110.02861. Like its published code, this works in float32: the parts are torch's `linspace` (from the
    nearer end, with fused steps); midpoints and decade factors are each rounded to float32.
    """
    f32 = np.float32
    low, values = f32(0.1), [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        step = (f32(1) - low) / f32(parts)
        edge = [float32(Fraction(float(low)) + i * Fraction(float(step))) for i in range(parts + 1)]
        for i in range(parts + 1):
            if 2 * i >= parts + 1:
                edge[i] = float32(1 - (parts - i) * Fraction(float(step)))
        middle = [float32(Fraction(float32(Fraction(a) + Fraction(b))) / 2) for a, b in pairwise(edge)]
        factor = float32(Fraction(10) ** (decade - 6))
        positive = [float32(Fraction(m) * Fraction(factor)) for m in middle]
        values += positive + ([-v for v in positive] if signed else [])
    return sorted(values)


def codebook(name: str) -> list[float]:
    """The value of each code."""
    if name == "bnb_fp4":
        positive = [float32(Fraction(v) / 12) for v in FP4_TWELFTHS.split()]
        return positive + [-v for v in positive]  # code 8 is -0, to which nothing is rounded
    if name in ("nf4", "af4"):
        return [float32(Fraction(v)) for v in (NF4 if name == "nf4" else AF4).split()]
    return dynamic_map(signed=name == "dynamic8")


@dataclass(frozen=True, eq=False)
class Listed:
    """A format of at most 16 bits as sorted arrays: rounding is a search in `values`, decided by `cuts`."""

    name: str
    bits: int
    decoded: np.ndarray
    """The value of each code, float64."""
    values: np.ndarray
    """The possible results of rounding, ascending: distinct finite values (without the -128 of a symmetric int8)."""
    cuts: np.ndarray
    """The boundaries of nearest rounding between neighbours; for posits, between bit strings."""
    tie_rises: np.ndarray
    """For each cut, whether nearest_even rounds the cut itself up."""
    overflow: Fraction | None
    """The hypothetical value after the largest, if rounding beyond it overflows; None if it saturates."""
    infinity: bool
    not_a_number: bool
    negative_zero: bool
    infinity_is_nan: bool
    """Whether infinity becomes NaN in both overflow modes (fnuz, posits)."""
    positive_only: bool = False
    """e8m0: zero and negative values become NaN."""

    @property
    def max(self) -> float:
        return float(self.values[-1])

    @property
    def min(self) -> float:
        return float(self.values[0])

    @property
    def signed(self) -> bool:
        return self.min < 0

    @property
    def beyond(self) -> float:
        """The result of overflow in ieee mode."""
        return math.inf if self.infinity else math.nan

    def round(self, x: np.ndarray, mode: str, overflow: str) -> np.ndarray:
        """Each element of x (float64) rounded once, including signs of zero and NaN."""
        grid, cuts, rises = self._extended()
        ends = grid[[0, -1]] if self.overflow is None else np.nextafter(grid[[0, -1]], self.values[[0, -1]])
        inside = np.clip(np.where(np.isnan(x), grid[0], x), *ends)  # excludes the value after the largest itself
        low = np.minimum(np.searchsorted(grid, inside, side="right") - 1, len(grid) - 2)
        exact = inside == grid[low]
        if mode == "nearest_even":
            up = (inside > cuts[low]) | ((inside == cuts[low]) & rises[low])
        elif mode == "nearest_away":
            up = (inside > cuts[low]) | ((inside == cuts[low]) & (inside > 0))
        elif mode == "nearest_up":
            up = inside >= cuts[low]
        else:
            rising = {"up": True, "down": False, "toward_zero": x < 0}[mode]
            up = rising | (inside == grid[low + 1])
        index = low + (up & ~exact)
        result = grid[index]
        if self.overflow is not None:
            past = np.abs(result) > self.max
            limit = self.max if overflow == "saturate" else self.beyond
            result = np.where(past, np.copysign(limit, x), result)
        if self.infinity_is_nan:
            infinite = np.full(x.shape, math.nan)
        elif self.overflow is None:
            infinite = np.where(x < 0, self.min, self.max)
        else:
            infinite = np.copysign(self.max if overflow == "saturate" else self.beyond, x)
        result = np.where(np.isinf(x), infinite, result)
        result = np.where(result == 0, np.copysign(0.0, x) if self.negative_zero else 0.0, result)
        if self.positive_only:
            result = np.where(x <= 0, math.nan, result)
        return np.where(np.isnan(x), math.nan, result)

    def neighbours(self, x: float) -> tuple[float, float]:
        """The values below and above x within the range, equal if x is a value."""
        low = bisect_right(self.values, x) - 1
        return float(self.values[low]), float(self.values[low if self.values[low] == x else low + 1])

    def _extended(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values, cuts and ties extended on both sides by the value after the largest."""
        if self.overflow is None:
            return self.values, self.cuts, self.tie_rises
        after = exact_float(self.overflow)
        if self.positive_only:
            middle = exact_float((Fraction(self.max) + self.overflow) / 2)
            return np.append(self.values, after), np.append(self.cuts, middle), np.append(self.tie_rises, True)
        middle = exact_float((Fraction(self.max) + self.overflow) / 2)
        odd = self.code_of[self.max] % 2 == 1  # then the next code is even, and the tie goes to it
        values = np.concatenate([[-after], self.values, [after]])
        cuts = np.concatenate([[-middle], self.cuts, [middle]])
        return values, cuts, np.concatenate([[not odd], self.tie_rises, [odd]])

    @property
    def code_of(self) -> dict[float, int]:
        """The code of each value (and infinity), the lowest if two codes share a value."""
        return _code_of(self)

    def encode(self, rounded: np.ndarray) -> np.ndarray:
        """The codes of values of the format; -1 for NaN, and -0's own code if it has one."""
        plain, negative_zero = np.sort(list(self.code_of)), None
        codes = np.array([self.code_of[v] for v in plain])
        if self.negative_zero:
            negative_zero = next(c for c, v in enumerate(self.decoded) if v == 0 and math.copysign(1, v) < 0)
        number = ~np.isnan(rounded)
        index = np.searchsorted(plain, np.where(number, rounded, plain[0]))
        assert (plain[index] == np.where(number, rounded, plain[0])).all(), "not values of the format"
        result = np.where(number, codes[index], -1)
        if negative_zero is not None:
            result = np.where((rounded == 0) & np.signbit(rounded), negative_zero, result)
        return result


@cache
def _code_of(format: Listed) -> dict[float, int]:
    allowed = {float(v) for v in format.values} | {math.inf, -math.inf}
    table: dict[float, int] = {}
    for code, value in enumerate(format.decoded.tolist()):
        if value in allowed and not (value == 0 and math.copysign(1, value) < 0):
            table.setdefault(value, code)
    return table


def middles(values: list[float]) -> np.ndarray:
    """The midpoints of neighbours; asserts that they are exact."""
    low, high = np.array(values[:-1]), np.array(values[1:])
    sums = low + high
    back = sums - low
    assert ((low - (sums - back)) + (high - back) == 0).all()  # the sums' rounding errors (Knuth's two-sum)
    assert (sums / 2 * 2 == sums).all()
    return sums / 2


def to_the_even_code(values: list[float], code: dict[float, int]) -> np.ndarray:
    """For each pair of neighbours, whether the upper one has the even code."""
    upper = np.array([code[v] % 2 == 0 for v in values[1:]])
    lower = np.array([code[v] % 2 == 0 for v in values[:-1]])
    assert (upper != lower).all()
    return upper


def make_float(name: str, exponent_bits: int, mantissa_bits: int, bias: int, specials: str) -> Listed:
    """A float format of at most 16 bits."""
    bits = 1 + exponent_bits + mantissa_bits
    decoded = [float_code(code, exponent_bits, mantissa_bits, bias, specials) for code in range(2**bits)]
    values = sorted({v + 0.0 for v in decoded if math.isfinite(v)})
    code = {v + 0.0: c for c, v in reversed(list(enumerate(decoded)))}
    step = Fraction(2) ** (floor_log2(Fraction(values[-1])) - mantissa_bits)
    return Listed(
        name,
        bits,
        np.array(decoded),
        np.array(values),
        middles(values),
        to_the_even_code(values, code),
        overflow=None if specials == "none" else Fraction(values[-1]) + step,
        infinity=specials == "ieee",
        not_a_number=any(map(math.isnan, decoded)),
        negative_zero=specials != "minus zero",
        infinity_is_nan=specials == "minus zero",
    )


def make_integer(name: str, low: int, high: int, steps: int) -> Listed:
    bits = high.bit_length() + (low < 0)
    numbers = [c - 2**bits if low < 0 and c >= 2 ** (bits - 1) else c for c in range(2**bits)]
    decoded = [exact_float(Fraction(n, steps)) for n in numbers]
    values = [exact_float(Fraction(n, steps)) for n in range(low, high + 1)]
    code = {v: c for c, v in enumerate(decoded)}
    ties = to_the_even_code(values, code)
    return Listed(
        name, bits, np.array(decoded), np.array(values), middles(values), ties, None, False, False, False, False
    )


def make_posit(name: str, bits: int, es: int) -> Listed:
    """A posit; the cut between codes c and c + 1 is the posit with one more bit and code 2c + 1."""
    fractions = [posit_closed_form(code, bits, es) for code in range(2**bits)]
    decoded = [math.nan if v is None else exact_float(v) for v in fractions]
    values = sorted(v for v in decoded if not math.isnan(v))
    positive = [exact_float(posit_by_magnitude(2 * c + 1, bits + 1, es)) for c in range(1, 2 ** (bits - 1) - 1)]
    cuts = [*(-c for c in reversed(positive)), 0.0, 0.0, *positive]  # only zero rounds to nearest zero
    code = {v: c for c, v in enumerate(decoded)}
    ties = to_the_even_code(values, code)
    return Listed(name, bits, np.array(decoded), np.array(values), np.array(cuts), ties, None, False, True, False, True)


def make_codebook(name: str, table: list[float]) -> Listed:
    values = sorted({v + 0.0 for v in table})
    cuts = middles(values)
    falls = np.full(len(cuts), False)
    bits = len(table).bit_length() - 1
    return Listed(name, bits, np.array(table), np.array(values), cuts, falls, None, False, False, False, False)


def make_e8m0() -> Listed:
    """2^-127 to 2^127 and NaN: nearest arithmetically, ties up."""
    values = [exact_float(Fraction(2) ** (code - 127)) for code in range(255)]
    cuts = middles(values)
    decoded = np.array([*values, math.nan])
    rises = np.full(len(cuts), True)
    over = Fraction(2) ** 128
    return Listed(
        "float8_e8m0fnu", 8, decoded, np.array(values), cuts, rises, over, False, True, False, False, positive_only=True
    )


@cache
def listed(name: str) -> Listed:
    """The oracle of a format of at most 16 bits."""
    if name in FLOATS:
        return make_float(name, *FLOATS[name])
    if name in INTEGERS:
        return make_integer(name, *INTEGERS[name])
    if name in POSITS:
        return make_posit(name, *POSITS[name])
    return make_e8m0() if name == "float8_e8m0fnu" else make_codebook(name, codebook(name))


@dataclass(frozen=True)
class Wide:
    """An IEEE-style float of any size, rounding one value at a time."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinity_is_nan = False

    @property
    def max(self) -> float:
        top = Fraction(2) ** (2**self.exponent_bits - 2 - self.bias)
        return exact_float((2 - Fraction(1, 2**self.mantissa_bits)) * top)

    @property
    def min(self) -> float:
        return -self.max

    def round(self, x: np.ndarray, mode: str, overflow: str) -> np.ndarray:
        return np.array([self.round_one(float(v), mode, overflow) for v in x])

    def around(self, size: Fraction) -> tuple[Fraction, Fraction]:
        """The neighbours of a positive value without an exponent limit, equal if it is a value."""
        exponent = max(floor_log2(size), 1 - self.bias)
        step = Fraction(2) ** (exponent - self.mantissa_bits)
        below = size // step * step
        return below, below if below == size else below + step

    def neighbours(self, x: float) -> tuple[float, float]:
        """The values below and above x within the range, equal if x is a value."""
        low, high = map(float, self.around(abs(Fraction(x))) if x else (Fraction(0), Fraction(0)))
        return (low, high) if x >= 0 else (-high, -low)

    def round_one(self, x: float, mode: str, overflow: str) -> float:
        limit = self.max if overflow == "saturate" else math.inf
        if math.isnan(x) or x == 0:
            return x
        if math.isinf(x):
            return math.copysign(limit, x)
        size = abs(Fraction(x))
        below, above = self.around(size)
        outward = {"up": x > 0, "down": x < 0, "toward_zero": False}.get(mode)
        if outward is None:
            if size - below == above - size:
                step = above - below
                outward = mode == "nearest_away" or (mode == "nearest_up" and x > 0)
                outward = outward or (mode == "nearest_even" and step != 0 and (below / step) % 2 == 1)
            else:
                outward = above - size < size - below
        result = above if outward else below
        if result > Fraction(self.max):
            inward = overflow == "saturate" or (mode in ("toward_zero", "up", "down") and not outward)
            return math.copysign(self.max if inward else math.inf, x)
        return math.copysign(float(result), x)


@dataclass(frozen=True)
class WidePosit:
    """A posit of any size, rounding one value at a time by truncating its infinite bit string."""

    name: str
    bits: int
    es: int
    infinity_is_nan = True

    @property
    def max(self) -> float:
        return exact_float(Fraction(2) ** ((self.bits - 2) * 2**self.es))

    @property
    def min(self) -> float:
        return -self.max

    def round(self, x: np.ndarray, mode: str, overflow: str) -> np.ndarray:
        return np.array([self.round_one(float(v), mode) for v in x])

    def encode_one(self, x: float, mode: str = "nearest_even") -> int:
        """The code of a float64."""
        if x == 0:
            return 0
        if not math.isfinite(x):
            return 2 ** (self.bits - 1)
        size = abs(Fraction(x))
        scale = floor_log2(size)
        regime, e = divmod(scale, 2**self.es)
        head = ("1" * (regime + 1) + "0" if regime >= 0 else "0" * -regime + "1") + (
            format(e, f"0{self.es}b") if self.es else ""
        )
        fraction = size / Fraction(2) ** scale - 1
        length = self.bits - 1 + 80  # a float64 has 52 fraction bits, so nothing is lost
        tail = fraction * 2**length
        assert tail.denominator == 1
        text = head + format(int(tail), f"0{length}b")
        kept, rest = int(text[: self.bits - 1], 2), text[self.bits - 1 :]
        half = rest[0] == "1"
        more = "1" in rest[1:]
        any_rest = half or more
        rises = {
            "nearest_even": half and (more or kept % 2 == 1),
            "nearest_away": half,
            "nearest_up": half and (more or x > 0),
            "toward_zero": False,
            "up": any_rest and x > 0,
            "down": any_rest and x < 0,
        }[mode]
        code = min(max(kept + rises, int("nearest" in mode)), 2 ** (self.bits - 1) - 1)
        return 2**self.bits - code if x < 0 and code else code

    def neighbours(self, x: float) -> tuple[float, float]:
        """The values below and above x within the range, equal if x is a value."""
        return self.round_one(x, "down"), self.round_one(x, "up")

    def round_one(self, x: float, mode: str) -> float:
        value = posit_by_magnitude(self.encode_one(x, mode), self.bits, self.es)
        return math.nan if value is None else exact_float(value)


def floor_log2(size: Fraction) -> int:
    """floor(log2(size)) of a positive fraction, exactly."""
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if Fraction(2) ** guess <= size else guess - 1


@cache
def get(name: str) -> Listed | Wide | WidePosit:
    """The oracle of any named format."""
    if name in WIDE_POSITS:
        return WidePosit(name, *WIDE_POSITS[name])
    if name in WIDE:
        return Wide(name, *FLOATS[name][:3])
    return listed(name)
