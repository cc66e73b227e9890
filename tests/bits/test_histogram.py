"""ExponentHistogram's shares equal the exact rounding of one value per binade."""

from fractions import Fraction

import pytest

from halfstep import formats
from halfstep.bits.histogram import ExponentHistogram
from halfstep.formats.exact import round_exactly


COUNTS = {e: 3 * abs(e) + 1 for e in range(-60, 20)}
FLOATS = [name for name in formats.names() if isinstance(formats.get(name), formats.Float)]


def outcome(format, exponent):
    """What rounding 1.5 * 2^exponent gives. Overflow is decided by the exponent, since "fn" and "finite" formats lack
    some fractions at the top."""
    x = Fraction(3, 2) * Fraction(2) ** exponent
    rounded = abs(round_exactly(x, format, "nearest_even", "saturate").value)
    if x >= 2 * Fraction(2) ** format.max_exponent:
        return "beyond"
    return "zeroed" if rounded == 0 else "subnormal" if x < format.min_normal else "normal"


@pytest.mark.quick("16")
@pytest.mark.parametrize("shift", [0, 3, 16])
def test_shares_equal_exact_rounding(shift):
    for format in map(formats.get, FLOATS):
        expected = dict.fromkeys(("zeroed", "subnormal", "normal", "beyond"), 0)
        for exponent, count in COUNTS.items():
            expected[outcome(format, exponent + shift)] += count
        total, histogram = sum(COUNTS.values()), ExponentHistogram(COUNTS, zeros=5, nonfinite=2)
        assert histogram.share_zeroed(format, 2.0**shift) == expected["zeroed"] / total, format.name
        assert histogram.share_subnormal(format, 2.0**shift) == expected["subnormal"] / total, format.name
        assert histogram.share_beyond(format, 2.0**shift) == expected["beyond"] / total, format.name
        assert histogram.size == total + 7


def test_shares_of_empty_histogram_are_zero():
    fp16 = formats.get("fp16", formats.Float)
    assert ExponentHistogram({}, zeros=3).share_zeroed(fp16) == 0.0
