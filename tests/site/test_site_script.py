"""The page's script equals Python: decoded codes, rounding, and the bytes on a device."""

import json
import random
import shutil
import subprocess
from fractions import Fraction
from math import copysign, isnan

import pytest
import torch

from halfstep import formats, round_to
from halfstep.accounting import Account, share
from halfstep.cli.formats.table import read_number
from halfstep.errors import FormatError
from halfstep.formats.exact import OVERFLOWS, ROUNDINGS, round_exactly
from halfstep.memory import StepBytes
from halfstep.site import memory, page as tab
from halfstep.site.page import script


FORMATS = [formats.get(name) for name in formats.names()]
TEXT = "const text = (x) => (Object.is(x, -0) ? '-0' : String(x));"
STAYS = "weights", "gradients", "master", "states", "scales", "buffers", "communication", "persistent"


@pytest.fixture(scope="session")
def javascript(tmp_path_factory):
    """javascript(files, body, given): the `return` value of a body that uses the files' definitions and `given`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH: the page's arithmetic is not tried")
    folder = tmp_path_factory.mktemp("javascript")

    def run(files, body, given):
        file = folder / "test.js"
        read = 'const given = JSON.parse(require("fs").readFileSync(0, "utf8"));'
        file.write_text(f"{script(files)}\n{read}\nprocess.stdout.write(JSON.stringify((() => {{ {body} }})()));")
        done = subprocess.run([node, str(file)], input=json.dumps(given), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def same(one, other):
    """Equality of two floats including the sign of zero; NaN equals NaN."""
    return (isnan(one) and isnan(other)) or (one == other and copysign(1, one) == copysign(1, other))


def test_decoded_codes_equal_python(javascript):
    listed = {f: list(f.codes()) if f.bits <= 8 else random.Random(0).sample(range(1 << f.bits), 2000) for f in FORMATS}
    body = TEXT + "return given.map(([format, codes]) => codes.map((code) => text(exact.decode(format, code))));"
    found = javascript(("exact",), body, [[tab.described(f), codes] for f, codes in listed.items()])
    for (format, codes), values in zip(listed.items(), found, strict=True):
        wrong = [hex(code) for code, x in zip(codes, values, strict=True) if not same(float(x), format.decode(code))]
        assert not wrong, format.name


def numbers(format, count, seed):
    """Values of all magnitudes within and beyond a format's range, including its own values and ties."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor([format.smallest, format.max], dtype=torch.float64).log2().tolist()
    exponents = low - 3 + (high - low + 6) * torch.rand(count, generator=generator, dtype=torch.float64)
    signs = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0).double()
    most = torch.finfo(torch.float32).max
    drawn = (signs * exponents.exp2()).clamp(-most, most).float()  # float32, so that no kernel rounds twice
    if format.bits <= 16:  # its own values, and its ties
        own = torch.tensor([*format.values(), *format.boundaries()], dtype=torch.float64).float()
        drawn[: count // 4] = own[torch.randint(len(own), (count // 4,), generator=generator)]
    return torch.where(drawn == 0, torch.tensor(0.0), drawn)  # JSON loses the sign of -0


def check_values(javascript, count):
    drawn = {format: numbers(format, count, 1) for format in FORMATS}
    body = (
        TEXT
        + """return given.map(([format, numbers]) =>
      numbers.map((x) => text(exact.round(format, exact.ofFloat(x)).value)));"""
    )
    found = javascript(("exact",), body, [[tab.described(f), xs.tolist()] for f, xs in drawn.items()])
    for (format, xs), values in zip(drawn.items(), found, strict=True):
        wanted = round_to(xs.double(), format).tolist()
        wrong = [(x, a, b) for x, a, b in zip(xs.tolist(), values, wanted, strict=True) if not same(float(a), b)]
        assert not wrong, format.name


@pytest.mark.slow
def test_rounded_values_equal_round_to(javascript):
    check_values(javascript, 500)


@pytest.mark.slow
def test_10000_rounded_values_per_format_equal_round_to(javascript):
    check_values(javascript, 10_000)


WORKING = (
    TEXT
    + """
const plain = (x) => x && [String(x.n), String(x.d)];
return given.map(([format, asked]) => asked.map(([x, rounding, overflow]) => {
  const found = exact.round(format, exact.read(x), rounding, overflow);
  const points = [found.below, found.above].map((each) => each && [plain(each.value), each.code]);
  const value = found.value === null ? null : text(found.value);
  return [value, found.code, ...points, plain(found.boundary), found.overflow];
}));"""
)
SPECIAL = ["inf", "-inf", "nan", "0", "-0", "1/3", "-2/7", "2^-24", "-1.5*2^7", "0x1.8p3", "1e999", "-1e-999", ".5"]


def texts(format, count, seed):
    """Numbers as people write them, including decimals that no float represents."""
    chance = random.Random(seed)
    floats = numbers(format, count, seed).tolist()
    return SPECIAL + [x.hex() if chance.random() < 0.5 else f"{x:.{chance.randint(1, 9)}g}" for x in floats]


def check_working(javascript, count):
    chance = random.Random(3)
    asked = {f: [(x, chance.choice(ROUNDINGS), chance.choice(OVERFLOWS)) for x in texts(f, count, 2)] for f in FORMATS}
    answers = javascript(("exact",), WORKING, [[tab.described(f), questions] for f, questions in asked.items()])
    for (format, questions), found in zip(asked.items(), answers, strict=True):
        for (x, rounding, overflow), answer in zip(questions, found, strict=True):
            compare(round_exactly(read_number(x), format, rounding, overflow), *answer)


def compare(wanted, value, code, below, above, turn, over):
    """Compare the script's result with Python's."""
    assert (value is None) == (wanted.value is None), wanted
    assert value is None or same(float(value), wanted.value), wanted
    assert (code, over) == (wanted.code, wanted.overflow), wanted
    for point, own in ((below, wanted.below), (above, wanted.above)):
        found = point and (Fraction(*map(int, point[0])), point[1])
        assert found == (own and (own.value, own.code)), wanted
    assert (turn and Fraction(*map(int, turn))) == wanted.boundary, wanted


def test_neighbours_boundaries_and_roundings_equal_python(javascript):
    check_working(javascript, 80)


@pytest.mark.slow
def test_neighbours_boundaries_and_roundings_of_10000_values_per_format(javascript):
    check_working(javascript, 10_000)


def test_parsed_numbers_equal_the_command_line(javascript):
    good = [*SPECIAL, " 3.25 ", "1_000", "+7", "-0x.8", "5.", "2**(-3)", "-3/9", "1e+2", "INFINITY", "-.5e1", "0/5"]
    bad = ["", "x", "1/0", "--1", "1e", "0x", "2^9999", "1e5000", "1.2.3", "1/-3", "--inf", "2^0.5", "9" * 401, "."]
    body = f"""{TEXT}
      const plain = (x) => (x === null ? x : exact.isFraction(x) ? [String(x.n), String(x.d)] : text(x));
      return given.map(exact.read).map(plain);"""
    for text, found in zip(good, javascript(("exact",), body, good), strict=True):
        wanted = read_number(text)
        assert same(float(found), wanted) if isinstance(found, str) else Fraction(*map(int, found)) == wanted, text
    assert javascript(("exact",), body, bad) == [None] * len(bad)
    for text in bad:
        with pytest.raises(FormatError):
            read_number(text)


def test_sharded_bytes_equal_python(javascript):
    data = memory.table()
    setups = [(ranks, zero) for ranks in (1, 8, 64) for zero in range(4) if ranks > 1 or not zero]
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"] if not isinstance(row, str)]
    body = """return given.rows.map((row) => given.setups.map(([ranks, zero]) =>
      Object.fromEntries(Object.entries(share(row, ranks, zero)).map(([name, size]) => [name, String(size)]))));"""
    found = javascript(("share",), body, {"rows": rows, "setups": setups})
    for row, answers in zip(rows, found, strict=True):
        counts = {name: row[name] for name in ("parameters", "trained")}
        held = StepBytes(**{name: size for name, size in row.items() if name not in counts})
        account = Account("any", **counts, bytes=held, passes=False)
        for (ranks, zero), answer in zip(setups, answers, strict=True):
            wanted = share(account, ranks, zero)
            assert {name: int(size) for name, size in answer.items()} == {name: getattr(wanted, name) for name in STAYS}
