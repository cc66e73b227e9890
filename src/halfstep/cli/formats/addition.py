"""An addition by hand: round both numbers, align them, add, round, and see which bits were lost."""

from dataclasses import dataclass
from fractions import Fraction
from math import copysign, isfinite
from typing import Any

from halfstep.cli.formats.page import rounding_data
from halfstep.cli.formats.plot import point_text
from halfstep.cli.formats.table import exact_text, labelled, share_text, short_text, width
from halfstep.errors import FormatError
from halfstep.formats import Float, Format
from halfstep.formats.exact import Rounded, round_exactly


@dataclass(frozen=True)
class Work:
    """Two operands rounded onto a format, and their sum before (`exact`) and after rounding, to nearest even."""

    format: Float
    a: Rounded
    b: Rounded
    exact: Fraction
    sum: Rounded

    @property
    def larger(self) -> Rounded:
        """The operand with the larger magnitude; the other one is shifted to it."""
        return max(self.a, self.b, key=lambda operand: abs(_value(operand)))

    @property
    def smaller(self) -> Rounded:
        """The other operand."""
        return self.b if self.larger is self.a else self.a

    @property
    def shift(self) -> int:
        """By how many places the smaller operand moves to the right."""
        return _exponent(self.format, _value(self.larger)) - _exponent(self.format, _value(self.smaller))

    @property
    def vanished(self) -> bool:
        """Whether the smaller operand, not zero, left the larger one where it was."""
        return _value(self.smaller) != 0 and self.sum.value == self.larger.value


def work_out(format: Format, a: Fraction | float, b: Fraction | float) -> Work:
    """a + b in a float format, each rounded to it first.

    Raises:
        FormatError: the format is not a float; a number is infinite, NaN, or beyond the format's largest value.
    """
    if not isinstance(format, Float):
        raise FormatError(
            f"{format.name} has no exponent and mantissa to align; addition by hand is shown for floats: "
            "fp32, bf16, fp16, e4m3fn, e5m2, e2m1fn, or any eXmY"
        )
    operands = [round_exactly(x, format, overflow="ieee") for x in (a, b)]
    for x, operand in zip((a, b), operands, strict=True):
        if operand.value is None or not isfinite(operand.value) or operand.overflow:
            raise FormatError(
                f"{exact_text(x)} is not within {format.name}, whose largest value is {exact_text(format.max)}; "
                "add takes finite numbers"
            )
    total = sum(map(_value, operands), Fraction(0))
    both_negative = all(operand.value is not None and copysign(1, operand.value) < 0 for operand in operands)
    signed = total if total or not both_negative else -0.0  # a fraction has no -0
    return Work(format, operands[0], operands[1], total, round_exactly(signed, format, overflow="ieee"))


def as_data(work: Work) -> dict[str, Any]:
    """The addition as JSON."""
    error = work.sum.error
    return {
        "format": work.format.name,
        "a": rounding_data(work.format, work.a),
        "b": rounding_data(work.format, work.b),
        "shift": work.shift,
        "exact_sum": str(work.exact),
        "sum": rounding_data(work.format, work.sum),
        "lost": None if error is None else str(-error),
        "vanished": work.vanished,
    }


def describe(work: Work) -> str:
    """The addition as text."""
    format = work.format
    top = _exponent(format, _value(work.larger))
    terms = {"a": _value(work.a), "b": _value(work.b), "sum": work.exact}
    rows = [(name, _significand(format, value, top)) for name, value in terms.items()]
    wide = max(len(whole) for _, (whole, _) in rows)
    aligned = [(name, f"{whole:>{wide}}|{_clipped(out)}".rstrip("|")) for name, (whole, out) in rows]
    return "\n\n".join(
        [
            f"({exact_text(work.a.x)}) + ({exact_text(work.b.x)}) in {format.name}",
            labelled([("a", _operand(format, work.a)), ("b", _operand(format, work.b))], indent=2),
            f"aligned to 2^{top} ({_moved(work)}); behind the bar: beyond the last bit",
            labelled(aligned, indent=2),
            _result(work),
        ]
    )


def _result(work: Work) -> str:
    result = work.sum
    rows = [("exact sum", exact_text(work.exact))]
    if result.below and result.above:
        rows.append(("between", f"{exact_text(result.below.value)} and {exact_text(result.above.value)}"))
    assert result.value is not None
    rows += [("rounded", point_text(work.format, result.value, result.code)), ("lost", _lost(work))]
    return labelled(rows, indent=2)


def _lost(work: Work) -> str:
    result, error = work.sum, work.sum.error
    if error is None:
        return f"everything: the sum is beyond the largest value, {exact_text(work.format.max)}"
    if error == 0:
        return "nothing: the sum is a value of the format"
    assert result.gap is not None
    if not work.vanished:
        share = share_text(abs(error), abs(_value(work.smaller)))
        return f"rounding changed the sum by {short_text(error)}: {share} of the smaller operand"
    name, other = ("b", "a") if work.smaller is work.b else ("a", "b")
    gaps = abs(error) / result.gap
    tie = f"exactly half, and the tie goes to the even mantissa, {other}'s"
    why = tie if gaps == Fraction(1, 2) else "less than half, so nothing is left of it"
    lines = [
        f"all of {name}, which vanished: it is {short_text(gaps, 3)} of the gap between {other} and its neighbour,",
        f"{why}. Adding it again and again never moves {other}.",
    ]
    if result.below and result.above and None not in (result.below.code, result.above.code):
        share = share_text(gaps, Fraction(1))
        lines.append(f"Rounded stochastically, {other} would move in {share} of all cases, and be right on average.")
    return " ".join(lines)


def _operand(format: Float, operand: Rounded) -> str:
    assert operand.value is not None
    rounded = "" if operand.error == 0 else f"  (rounded by {short_text(operand.error or 0)})"
    return f"{point_text(format, operand.value, operand.code)}{rounded}"


def _moved(work: Work) -> str:
    return f"{'b' if work.smaller is work.b else 'a'} moves right by {work.shift}" if work.shift else "nothing moves"


def _significand(format: Float, value: Fraction, top: int) -> tuple[str, str]:
    """A value in binary with the point at 2^top: what the mantissa has room for, and the bits beyond it."""
    whole, rest = divmod(abs(value) / Fraction(2) ** (top - format.mantissa_bits), 1)
    digits = f"{int(whole):0{format.mantissa_bits + 1}b}"
    split = len(digits) - format.mantissa_bits
    places = rest.denominator.bit_length() - 1  # a power of two
    out = f"{rest.numerator:0{places}b}" if places else ""
    point = "." if format.mantissa_bits else ""
    return f"{'-' if value < 0 else ' '}{digits[:split]}{point}{digits[split:]}", out


def _clipped(bits: str) -> str:
    room = max(12, width() - 44)
    return bits if len(bits) <= room else f"{bits[:room]}... ({len(bits) - room} more)"


def _exponent(format: Float, value: Fraction) -> int:
    """The exponent a value is stored with."""
    if value == 0:
        return format.min_exponent
    size = abs(value)
    # Values are dyadic: exact.
    return max(size.numerator.bit_length() - size.denominator.bit_length(), format.min_exponent)


def _value(operand: Rounded) -> Fraction:
    assert operand.value is not None
    return Fraction(operand.value)
