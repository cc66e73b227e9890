"""Text and JSON for one format, for rounding a number to it, and for an addition step by step."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import copysign, isfinite
from typing import Any

from halfstep import formats
from halfstep.cli.formats.plot import bits_text, fields, fields_text, hex_text, point_text, sketch
from halfstep.cli.formats.table import (
    bits_per_value,
    block_parameters,
    exact_text,
    kind,
    labelled,
    layout,
    parameters,
    plain,
    power_text,
    share_text,
    short_text,
    tile_text,
    width,
)
from halfstep.errors import FormatError, HalfstepError
from halfstep.formats import BlockFormat, Float, Format, Posit
from halfstep.formats.exact import Neighbour, Rounded, infinity_code, line, nan_codes, negated, round_exactly


MODES = {
    "nearest_even": "to nearest",
    "nearest_away": "to nearest, ties away from zero",
    "nearest_up": "to nearest, ties to the upper value",
    "toward_zero": "toward zero",
    "up": "up",
    "down": "down",
    "stochastic": "stochastically",
}
TIES = {"even": "the even code", "lower": "the lower value", "upper": "the upper value"}


# ---- a format --------------------------------------------------------------------------------------------------------


def find(name: str) -> tuple[Format | None, BlockFormat | None]:
    """The scalar format and the block format of that name; a codebook's name may have both.

    Raises:
        FormatError: there is neither; the message suggests the nearest names.
    """
    block = formats.get_block(name) if formats.is_block(name) else None
    try:
        return formats.get(name), block
    except HalfstepError:
        if block is None:
            raise
        return None, block


def scalar(name: str) -> Format:
    """The scalar format of that name.

    Raises:
        FormatError: there is none, or the name is a block format's.
    """
    found, _ = find(name)
    if found is None:
        raise needs_scalar(name)
    return found


def needs_scalar(name: str) -> FormatError:
    """The error for a block format's name where a scalar format is needed."""
    block = formats.get_block(name)
    return FormatError(
        f"{block.name} is a block format: what becomes of a number depends on its tile ({tile_text(block)}), so there "
        f"is no rounding one alone. Take its element format, {block.element.name}; halfstep.round_to(x, "
        f"{block.name!r}) rounds a tensor"
    )


def as_data(format: Format | None, block: BlockFormat | None, rounded: Rounded | None) -> dict[str, Any]:
    """The format and the rounded number as JSON data."""
    return {
        "format": None if format is None else parameters(format) | {"codes": special_codes(format)},
        "block_format": None if block is None else block_parameters(block),
        "value": None if rounded is None or format is None else rounding_data(format, rounded),
    }


def describe(format: Format | None, block: BlockFormat | None, rounded: Rounded | None, rounding: str) -> str:
    """The format and the rounded number as text."""
    parts = []
    if format is not None:
        parts += [_describe_scalar(format), sketch(format)]
    if block is not None:
        parts.append(_describe_block(block))
    if format is not None and rounded is not None:
        parts.append(_describe_rounding(format, rounded, rounding))
    return "\n\n".join(parts)


def special_codes(format: Format) -> dict[str, Any]:
    """The codes of zero, the largest value, infinity, NaN ...; runs of NaN codes as first and last."""
    values = line(format)
    zero = values.code(values.at_most(0)) if format.min <= 0 else None
    binary = format if isinstance(format, Float) else None
    return {
        "zero": zero,
        "negative_zero": negated(binary, 0) if binary and binary.has_negative_zero else None,
        "max": values.code(values.numbers[-1]),
        "smallest": values.code(values.at_most(format.smallest)),
        "infinity": infinity_code(binary) if binary and binary.has_infinity else None,
        "nan": [[run[0], run[-1]] for run in nan_codes(format)],
        **({"min_normal": values.code(values.at_most(binary.min_normal))} if binary else {}),
    }


def _describe_scalar(format: Format) -> str:
    codes, values = special_codes(format), len(line(format).numbers)
    runs = [hex_text(format, a) if a == b else f"{hex_text(format, a)}..{hex_text(format, b)}" for a, b in codes["nan"]]
    points = [("largest", format.max, codes["max"])]
    if isinstance(format, Float):
        points.append(("least normal", format.min_normal, codes["min_normal"]))
    points.append(("least positive", format.smallest, codes["smallest"]))
    zero = "none" if codes["zero"] is None else hex_text(format, codes["zero"])
    zero += "" if codes["negative_zero"] is None else f", -0 is {hex_text(format, codes['negative_zero'])}"
    infinity = codes["infinity"]
    signs = "" if infinity is None else f", - {hex_text(format, negated(formats.get(format, Float), infinity))}"
    return labelled(
        [
            (format.name, ", ".join(format.aliases)),
            ("", format.source),
            (
                "kind",
                f"{kind(format)}: {'sign-exponent-mantissa ' if isinstance(format, Float) else ''}{layout(format)}",
            ),
            ("bits", f"{format.bits}; {format.bytes:g} byte{'s' * (format.bytes != 1)} a value"),
            *((label, point_text(format, value, code)) for label, value, code in points),
            ("most negative", exact_text(format.min)),
            ("eps", "1 has no neighbour above" if format.eps is None else power_text(format.eps) or f"{format.eps:g}"),
            ("zero", zero),
            ("infinity", "none" if infinity is None else f"+ {hex_text(format, infinity)}{signs}"),
            ("NaN", ", ".join(runs) + (" (NaR)" if isinstance(format, Posit) else "") or "none"),
            ("ties go to", TIES[format.ties]),
            ("finite values", str(values)),
        ]
    )


def _describe_block(block: BlockFormat) -> str:
    rows = [
        (f"{block.name} blocks", ", ".join(block.aliases)),
        ("", block.source),
        ("element", block.element.name),
        ("tile", f"{tile_text(block)}: these values share a scale"),
        ("scale rules", ", ".join([f"{block.rules[0]} (default)", *block.rules[1:]])),
        ("bits a value", f"{bits_per_value(block)} (element {block.element.bits}, scale {block.scale_bits:g} a tile)"),
    ]
    if block.outliers is not None:
        rows.append(("outliers", f"columns with a magnitude of {block.outliers:g} or more are kept as they are"))
    return labelled(rows)


# ---- rounding a number -----------------------------------------------------------------------------------------------


def _describe_rounding(format: Format, rounded: Rounded, rounding: str) -> str:
    rows = [("number", exact_text(rounded.x))]
    turn = rounded.boundary
    if rounded.below and rounded.above and turn is not None:
        where = "half way" if 2 * turn == rounded.below.value + rounded.above.value else "cut on the bit string"
        rows += [
            ("below", _neighbour_text(format, rounded.below)),
            ("boundary", f"{exact_text(turn):<22}  {where}"),
            ("above", _neighbour_text(format, rounded.above)),
        ]
    if rounded.value is not None:
        rows.append(("rounded", point_text(format, rounded.value, rounded.code)))
    text = [f"{exact_text(rounded.x)} rounded {MODES[rounding]}", labelled(rows, indent=2)]
    if rounded.code is not None:
        text.append(fields_text(format, rounded.code, indent=4))
    return "\n".join([*text, labelled(_notes(format, rounded, rounding), indent=2)])


def _neighbour_text(format: Format, neighbour: Neighbour) -> str:
    if neighbour.code is None:
        return f"{exact_text(neighbour.value):<22}  beyond the largest value"
    return point_text(format, neighbour.value, neighbour.code)


def _notes(format: Format, rounded: Rounded, rounding: str) -> Iterator[tuple[str, str]]:
    error = rounded.error
    if rounded.value is None and rounded.chance_up is not None:
        yield "chance", f"{share_text(rounded.chance_up, Fraction(1))} to go up: right on average"
    elif error == 0:
        yield "error", "none: the number is a value of the format"
    elif error is not None:
        gaps = f" = {short_text(error / rounded.gap)} of a gap" if rounded.gap else ""
        yield "error", f"{short_text(error)}{gaps}; {share_text(error, abs(Fraction(rounded.x)))} of the number"
    if rounded.tie and rounding.startswith("nearest") and rounded.value is not None:
        ways = {"nearest_even": TIES[format.ties], "nearest_up": TIES["upper"]}
        yield "tie", f"exactly on the boundary: goes to {ways.get(rounding, 'the larger magnitude')}"
    if rounded.overflow:
        saturated = rounded.value is not None and isfinite(rounded.value)
        yield "overflow", "beyond the largest value" + (", so that is the result" if saturated else "")
    if rounded.underflow:
        yield "underflow", "the number became zero"
    elif isinstance(format, Float) and rounded.value is not None and 0 < abs(rounded.value) < format.min_normal:
        yield "subnormal", "below the least normal value: the leading bits of the mantissa are zero"
    if rounded.code is None and rounded.value is not None:
        yield "no code", f"round_to keeps {rounded.value:g}; encode refuses it, {format.name} has no code for it"


def rounding_data(format: Format, rounded: Rounded) -> dict[str, Any]:
    """The rounding as JSON data: exact values as fraction strings, codes as integers."""

    def neighbour(side: Neighbour | None) -> dict[str, Any] | None:
        return None if side is None else {"value": plain(side.value), "exact": str(side.value), "code": side.code}

    code, error = rounded.code, rounded.error
    return {
        "number": plain(rounded.x),
        "exact": str(rounded.x),
        "below": neighbour(rounded.below),
        "boundary": None if rounded.boundary is None else str(rounded.boundary),
        "above": neighbour(rounded.above),
        "rounded": plain(rounded.value),
        "code": code,
        "bits": None if code is None else bits_text(format, code),
        "fields": [] if code is None else [asdict(field) for field in fields(format, code)],
        "error": plain(error),
        "error_in_gaps": plain(error / rounded.gap if error is not None and rounded.gap else None),
        "relative_error": plain(None if error is None or rounded.x == 0 else error / abs(Fraction(rounded.x))),
        "chance_up": plain(rounded.chance_up),
        "tie": rounded.tie,
        "overflow": rounded.overflow,
        "underflow": rounded.underflow,
    }


# ---- an addition -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Two operands rounded to a format, and their sum before rounding (`exact`) and after, to nearest even."""

    format: Float
    a: Rounded
    b: Rounded
    exact: Fraction
    sum: Rounded

    @property
    def larger(self) -> Rounded:
        """The operand with the larger magnitude; the other one is aligned to it."""
        return max(self.a, self.b, key=lambda operand: abs(_value(operand)))

    @property
    def smaller(self) -> Rounded:
        """The operand with the smaller magnitude."""
        return self.b if self.larger is self.a else self.a

    @property
    def shift(self) -> int:
        """The number of bits by which the smaller operand is shifted right."""
        return _exponent(self.format, _value(self.larger)) - _exponent(self.format, _value(self.smaller))

    @property
    def vanished(self) -> bool:
        """Whether the sum equals the larger operand although the smaller one is not zero."""
        return _value(self.smaller) != 0 and self.sum.value == self.larger.value


def work_out(format: Format, a: Fraction | float, b: Fraction | float) -> Work:
    """a + b in a float format, with each operand rounded to it first.

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


def addition_data(work: Work) -> dict[str, Any]:
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


def describe_addition(work: Work) -> str:
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
    """A value in binary with the point at 2^top: the bits that fit the mantissa, and the bits beyond it."""
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
    """The exponent that a value is stored with."""
    if value == 0:
        return format.min_exponent
    size = abs(value)
    # Values are dyadic: exact.
    return max(size.numerator.bit_length() - size.denominator.bit_length(), format.min_exponent)


def _value(operand: Rounded) -> Fraction:
    assert operand.value is not None
    return Fraction(operand.value)
