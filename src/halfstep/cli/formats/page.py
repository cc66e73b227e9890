"""Everything about one format, and what rounding onto it makes of a number."""

from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from math import isfinite
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
)
from halfstep.errors import FormatError, HalfstepError
from halfstep.formats import BlockFormat, Float, Format, Posit
from halfstep.formats.exact import Neighbour, Rounded, infinity_code, line, nan_codes, negated


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


def find(name: str) -> tuple[Format | None, BlockFormat | None]:
    """The scalar format and the block format of a name; a codebook's name may be both.

    Raises:
        FormatError: there is neither; the nearest ones are shown.
    """
    block = formats.get_block(name) if formats.is_block(name) else None
    try:
        return formats.get(name), block
    except HalfstepError:
        if block is None:
            raise
        return None, block


def scalar(name: str) -> Format:
    """The scalar format of a name.

    Raises:
        FormatError: there is none, or it names blocks.
    """
    found, _ = find(name)
    if found is None:
        raise needs_scalar(name)
    return found


def needs_scalar(name: str) -> FormatError:
    """What to say of a block format where numbers are rounded one by one."""
    block = formats.get_block(name)
    return FormatError(
        f"{block.name} is a block format: what becomes of a number depends on its tile ({tile_text(block)}), so there "
        f"is no rounding one alone. Take its element format, {block.element.name}; halfstep.round_to(x, "
        f"{block.name!r}) rounds a tensor"
    )


def as_data(format: Format | None, block: BlockFormat | None, rounded: Rounded | None) -> dict[str, Any]:
    """All of it as JSON."""
    return {
        "format": None if format is None else parameters(format) | {"codes": special_codes(format)},
        "block_format": None if block is None else block_parameters(block),
        "value": None if rounded is None or format is None else rounding_data(format, rounded),
    }


def describe(format: Format | None, block: BlockFormat | None, rounded: Rounded | None, rounding: str) -> str:
    """All of it as text."""
    parts = []
    if format is not None:
        parts += [_describe_scalar(format), sketch(format)]
    if block is not None:
        parts.append(_describe_block(block))
    if format is not None and rounded is not None:
        parts.append(_describe_rounding(format, rounded, rounding))
    return "\n\n".join(parts)


def special_codes(format: Format) -> dict[str, Any]:
    """The codes that a reader of bits looks for; NaN as runs of first and last."""
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
    """What rounding did, as JSON; exact numbers as texts of fractions, codes as whole numbers."""

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
