"""`halfstep formats`: tables, single formats, comparisons and additions, checked against worked examples."""

import json
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from families import in_turn, slow_unless
from halfstep import formats, round_to


@pytest.fixture
def rounding(run):
    """A function that returns the JSON of `show NAME --value X`."""

    def command(name, value, *options):
        code, out, err = run("formats", "show", name, "--value", value, "--json", *options)
        assert (code, err) == (0, "")
        return json.loads(out)["value"]

    return command


@pytest.fixture
def adding(run):
    """A function that returns the JSON of `add NAME A B`."""

    def command(*arguments):
        code, out, err = run("formats", "add", *arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return command


def test_tables_hold_every_format(run):
    code, out, err = run("formats")
    assert (code, err) == (0, "")
    scalar, block = out.split("\n\n")
    assert [line.split()[0] for line in scalar.splitlines()[1:]] == formats.names()
    assert [line.split()[0] for line in block.splitlines()[1:]] == formats.block_names()
    for line, name in zip(scalar.splitlines()[1:], formats.names(), strict=True):
        assert f" {formats.get(name).max:.6g} " in line
    assert "e4m3fn, fp8_e4m3" in scalar
    assert "floor, ceil, even, rceil" in block


@pytest.mark.quick("120")
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_fit_the_terminal(run, columns):
    lines = run("formats", columns=columns)[1].splitlines()
    assert max(map(len, lines)) <= columns
    rows = [line for line in lines if line.split() and line.split()[0] in {*formats.names(), *formats.block_names()}]
    assert len(rows) == len(formats.names()) + len(formats.block_names())
    assert any("in a wider terminal, or with --json" in line for line in lines)


def test_tables_as_json(run):
    data = json.loads(run("formats", "--json")[1])
    assert [f["name"] for f in data["formats"]] == formats.names()
    assert [b["name"] for b in data["block_formats"]] == formats.block_names()
    for entry in data["formats"]:
        format = formats.get(entry["name"])
        for key in ("bits", "max", "min", "smallest", "eps", "has_infinity", "has_nan", "ties", "source"):
            assert entry[key] == getattr(format, key)
    by_name = {b["name"]: b for b in data["block_formats"]}
    assert by_name["mxfp4"]["bits_per_value"] == 4.25
    assert by_name["nvfp4"]["element"] == "float4_e2m1fn"


SHOWN, WIDTHS = [*formats.names(), "e8m3", "posit6_1"], (60, 100)


@pytest.mark.quick("float8_e4m3b11fnuz-100", "float4_e2m1fn-100", "posit6_1-60")
@pytest.mark.parametrize(
    ("name", "columns"), slow_unless(in_turn(SHOWN, WIDTHS).__contains__, [*product(SHOWN, WIDTHS)])
)
def test_shown_format_fits_the_terminal(run, name, columns):
    code, out, err = run("formats", "show", name, "--value", "0.7", columns=columns)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= columns
    assert out.startswith(formats.get(name).name)
    assert "0.7 rounded to nearest" in out


@pytest.mark.quick("fp8_1x128", "uint4_64")
@pytest.mark.parametrize("name", formats.block_names())
def test_shown_block_format(run, name):
    code, out, err = run("formats", "show", name)
    block = formats.get_block(name)
    assert (code, err) == (0, "")
    assert f"{name} blocks" in out
    assert f"{block.rules[0]} (default)" in out
    assert json.loads(run("formats", "show", name, "--json")[1])["block_format"]["tile"] == list(block.tile)


def test_special_codes_equal_the_specifications(run):
    def codes(name):
        return json.loads(run("formats", "show", name, "--json")[1])["format"]["codes"]

    assert codes("e4m3fn")["max"] == 0x7E
    assert codes("e4m3fn")["nan"] == [[0x7F, 0x7F], [0xFF, 0xFF]]
    assert codes("e4m3fn")["infinity"] is None
    assert codes("e5m2")["infinity"] == 0x7C
    assert codes("e5m2")["nan"] == [[0x7D, 0x7F], [0xFD, 0xFF]]
    assert codes("e4m3fnuz")["nan"] == [[0x80, 0x80]]
    assert codes("e4m3fnuz")["negative_zero"] is None
    assert codes("fp32")["min_normal"] == 0x00800000
    assert codes("fp32")["nan"] == [[0x7F800001, 0x7FFFFFFF], [0xFF800001, 0xFFFFFFFF]]
    assert codes("posit16_1")["nan"] == [[0x8000, 0x8000]]
    assert codes("e8m0")["zero"] is None
    assert codes("e8m0")["nan"] == [[0xFF, 0xFF]]
    assert codes("nf4")["zero"] == 7


def test_4_bit_format_lists_all_values(run):
    out = run("formats", "show", "fp4")[1]
    for code in range(16):
        value = [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] * (-1 if code & 8 else 1)
        assert f"0x{code:x} {code >> 3} {code >> 1 & 3:02b} {code & 1}" in out
        assert f" {value:g}" in out


@pytest.mark.quick(
    "bf16--0x1.8p3-1 10000010 1000000--12.0",
    "e5m2-inf-0 11110 11-57344.0",
    "int8--3-11111101--3.0",
    "nf4-1/3-1011-0.33791524171829224",
    "e8m0-3-10000001-4.0",
)
@pytest.mark.parametrize(
    ("name", "value", "bits", "result"),
    [
        ("e4m3fn", "3.25", "0 1000 101", 3.25),
        ("fp32", "3.25", "0 10000000 10100000000000000000000", 3.25),
        ("bf16", "-0x1.8p3", "1 10000010 1000000", -12.0),
        ("fp16", "2^-24", "0 00000 0000000001", 2.0**-24),
        ("e5m2", "inf", "0 11110 11", 57344.0),
        ("posit8_2", "3.25", "0 10 01 101", 3.25),
        ("posit8_0", "-1.5", "1 10 10000", -1.5),
        ("posit16_2", "100", "0 110 10 1001000000", 100.0),
        ("int8", "-3", "11111101", -3.0),
        ("ocp_int8", "0.5", "00100000", 0.5),
        ("nf4", "1/3", "1011", 0.33791524171829224),
        ("e8m0", "3", "10000001", 4.0),
    ],
)
def test_bit_fields_of_values(rounding, name, value, bits, result):
    """Posits are read from the magnitude (method A); the other codes are written by hand from the definitions."""
    data = rounding(name, value)
    assert data["bits"] == bits
    assert data["rounded"] == result


def test_rounding_of_a_value_is_described(run, rounding):
    data = rounding("e4m3fn", "3.3")
    assert (data["below"]["value"], data["boundary"], data["above"]["value"]) == (3.25, "27/8", 3.5)
    assert (data["exact"], data["error_in_gaps"], data["tie"]) == ("33/10", -0.2, False)
    assert data["relative_error"] == pytest.approx(-0.05 / 3.3)
    assert rounding("fp4", "5")["tie"]
    assert rounding("fp4", "5", "--rounding", "nearest_away")["rounded"] == 6
    assert rounding("fp4", "5", "--rounding", "stochastic")["chance_up"] == 0.5
    assert rounding("e4m3fn", "480", "--overflow", "ieee")["rounded"] == "nan"
    assert rounding("fp16", "70000", "--overflow", "ieee")["rounded"] == "inf"
    assert rounding("fp16", "1e-30")["underflow"]
    assert rounding("posit8_2", "4194305")["boundary"] == "4194304"
    text = run("formats", "show", "fp4", "--value", "5")[1]
    for words in ("below     4", "above     6", "exactly on the boundary: goes to the even code", "-0.5 of a gap"):
        assert words in text
    assert "cut on the bit string" in run("formats", "show", "posit8_2", "--value", "4194305")[1]


def test_value_is_parsed_exactly(rounding):
    """257 + 2^-40 is above the tie; float32 would round it onto the tie first."""
    assert rounding("bf16", "257.0000000000009094947017729282379150390625")["rounded"] == 258
    assert rounding("bf16", "257")["rounded"] == 256
    assert rounding("fp32", "1e-400")["underflow"]
    assert rounding("posit32_2", "1e-400")["rounded"] == 2.0**-120


@pytest.mark.quick("e2m1fn")
@pytest.mark.parametrize(
    "name", slow_unless(("bf16", "e2m1fn", "fp32").__contains__, ["bf16", "fp16", "e4m3fn", "e2m1fn", "fp32"])
)
def test_additions_agree_with_fractions(adding, name):
    generator = np.random.default_rng(5)
    for a, b in generator.standard_normal((8, 2)) * [1.5, 0.02]:
        a, b = (round_to(torch.tensor(x, dtype=torch.float64), name).item() for x in (a, b))
        total = float(Fraction(a) + Fraction(b))
        data = adding(name, repr(a), repr(b))
        assert Fraction(data["exact_sum"]) == Fraction(a) + Fraction(b)
        assert data["sum"]["rounded"] == round_to(torch.tensor(total, dtype=torch.float64), name).item()
        assert data["vanished"] == (min(a, b, key=abs) != 0 and data["sum"]["rounded"] == max(a, b, key=abs))


def test_small_update_vanishes(run, adding):
    data = adding("bf16", "1", "0.001")
    assert data["vanished"]
    assert data["shift"] == 10
    assert Fraction(data["lost"]) == Fraction(131, 131072)  # 0.001 in bf16: 1.0000011b * 2^-10
    text = run("formats", "add", "bf16", "1", "0.001")[1]
    assert "0.0000000|0010000011" in text
    assert "all of b, which vanished: it is 0.128 of the gap between a and its neighbour" in text
    tie = run("formats", "add", "fp16", "2048", "1", columns=200)[1]
    assert "0.0000000000|1" in tie
    assert "exactly half, and the tie goes to the even mantissa, a's" in tie
    assert adding("fp16", "2050", "1")["sum"]["rounded"] == 2052  # the same half, but now the even one is above


def test_additions_of_negative_numbers_and_edges(adding):
    assert adding("bf16", "1", "-0.5")["sum"]["rounded"] == 0.5
    assert adding("fp16", "-1", "-0x1p-3")["sum"]["rounded"] == -1.125
    assert adding("e5m2", "57344", "57344")["sum"]["rounded"] == "inf"
    assert adding("e4m3fn", "448", "32")["sum"]["rounded"] == "nan"
    assert adding("fp4", "6", "6")["sum"]["rounded"] == 6
    assert adding("fp16", "0.3", "-0.3")["sum"]["code"] == 0
    assert adding("fp16", "-0", "-0")["sum"]["code"] == 0x8000
    assert adding("fp32", "1e30", "-1e-30")["vanished"]


@pytest.fixture
def compared(run):
    """A function that returns the JSON of `compare A B`."""
    return lambda a, b: json.loads(run("formats", "compare", a, b, "--json")[1])


def test_comparison_of_two_formats(compared):
    data = compared("e4m3fn", "bf16")
    assert data["only_in_a"] == {"count": 0, "examples": []}
    assert data["values"] == [253, 2 * 254 * 128 + 2 * 127 + 1]
    assert data["decades"][0] == pytest.approx(np.log10(448 / 2**-9))
    assert compared("posit8_2", "bf16")["only_in_a"]["count"] == 0
    beyond = compared("posit8_2", "fp16")["only_in_a"]
    assert beyond["count"] == 8  # ± 2^16, 2^18, 2^20, 2^24
    assert all(abs(v) >= 2**16 for v in beyond["examples"])


@pytest.mark.slow
def test_comparison_of_wide_formats(compared):
    assert compared("posit16_1", "fp32")["only_in_a"]["count"] == 0
    assert compared("bf16", "tf32")["only_in_a"]["count"] == 0
    assert compared("posit32_2", "fp32")["only_in_a"]["count"] / 2**32 == pytest.approx(0.81, abs=0.005)


@pytest.mark.parametrize(
    "pair",
    [
        ("e4m3fn", "posit8_1"),
        ("e3m9", "int8"),
        *(
            pytest.param(pair, marks=pytest.mark.slow)
            for pair in (("fp16", "posit16_1"), ("bf16", "fp16"), ("posit16_2", "posit16_1"))
        ),
    ],
)
def test_counts_of_common_values_equal_set_intersection(run, pair):
    a, b = (set(formats.get(name).values()) for name in pair)
    data = json.loads(run("formats", "compare", *pair, "--json")[1])
    assert (data["common"], data["only_in_a"]["count"]) == (len(a & b), len(a - b))
    assert set(data["only_in_a"]["examples"]) <= a - b
    assert sum(data["per_binade"][0]) == sum(v > 0 for v in a)


@pytest.mark.quick("posit8_1-0.013297")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        *[("bf16", 1.6578e-3), ("fp16", 2.0683e-4), ("tf32", 2.0683e-4), ("e4m3fn", 2.6527e-2), ("e5m2", 5.2727e-2)],
        *[("e3m4", 1.3413e-2), ("posit8_1", 1.3297e-2), ("posit16_1", 5.212e-5)],
    ],
)
def test_errors_on_normal_values_equal_published(run, name, error):
    """Published errors, measured on 65536 random values (posits: 8192)."""
    data = json.loads(run("formats", "compare", name, "e2m1fn", "--json")[1])
    assert data["normal_error"][0] == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize("columns", [60, 100])
def test_comparison_fits_the_terminal(run, columns):
    code, out, err = run("formats", "compare", "e4m3fn", "e5m2", columns=columns)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= columns
    assert "118 of 253 values are not" in out
    assert "every value is exact" in run("formats", "compare", "e4m3fn", "fp16")[1]
