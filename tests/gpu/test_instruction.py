"""The inline PTX that makes and reads E4M3 and E5M2 codes, executed line by line in Python.

A wrong constant, a swapped operand or a byte in another position gives another result. `cvt` itself is replaced by the
format's reference."""

import ast
import re
from pathlib import Path

import pytest
import torch

from halfstep import formats, quant
from halfstep.kernels import gpu
from halfstep.kernels.selftest.case import hard


SOURCE = Path(gpu.__file__).parent / "jit" / "instruction.py"
NAMES = {"_E4M3": "float8_e4m3fn", "_E5M2": "float8_e5m2"}


def assembly(name):
    """The text of one of the constants of the module, which cannot be imported without triton."""
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.AnnAssign) and node.target.id == name:
            return node.value.args[0].value
    raise LookupError(name)


def converted(format, value):
    """`cvt.rn.satfinite`, which gives NaN one code without a sign."""
    if value != value:
        return 0x7F
    return int(quant.encode(torch.tensor([value]), format, "nearest_even", "saturate")[0])


def permuted(a, b, selector):
    """`prmt`: byte i of the result is the byte of {b, a} that nibble i selects."""
    both = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return int.from_bytes(bytes(both[selector >> 4 * i & 7] for i in range(4)), "little")


def lop3(a, b, c, table):
    """`lop3`: each result bit is looked up in the truth table of three bits."""
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def values_of(text, format, codes):
    """The results of the assembly `_VALUES` on four codes."""
    held = {"$4": codes}
    for name, given in re.findall(r"^\s*(mov\S*|cvt\S*) ([^;]*);", text, re.MULTILINE):
        to, source = re.fullmatch(r"(\{.*\}|\S+), (\S+)", given).groups()
        if name == "mov.b32":
            half = len(held[source]) // 2
            held |= zip(to.strip("{}").split(", "), (held[source][:half], held[source][half:]), strict=True)
        elif name == "cvt.rn.f16x2.KINDx2":
            held[to] = [format.decode(code) for code in held[source]]
        else:
            assert name == "cvt.f32.f16"
            (held[to],) = held[source]
    return [held[f"${place}"] for place in range(4)]


@pytest.mark.parametrize("name", NAMES.values())
def test_the_assembly_decodes_all_codes(name):
    """Every code in each of four positions; all values are exact in float16."""
    format = formats.get(name)
    text = assembly("_VALUES")
    for start in range(256):
        codes = [(start + place) % 256 for place in range(4)]
        found, expected = values_of(text, format, codes), [format.decode(code) for code in codes]
        assert str(found) == str(expected)
        assert str(torch.tensor(expected, dtype=torch.float16).tolist()) == str(expected)


@pytest.mark.parametrize(("right", "wrong"), [("$3, two", "$3, one"), ("$2, one", "$2, two")])
def test_a_swapped_operand_in_decoding_is_detected(right, wrong, monkeypatch):
    text = assembly("_VALUES")
    assert right in text
    monkeypatch.setattr(f"{__name__}.assembly", lambda _: text.replace(right, wrong))
    with pytest.raises((AssertionError, KeyError)):
        test_the_assembly_decodes_all_codes("float8_e4m3fn")


def run(text, format, bits):
    """The result of the assembly on four float32 bit patterns."""
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32).tolist()
    held = {f"${i + 1}": word for i, word in enumerate(bits)}
    floats = {f"${i + 1}": value for i, value in enumerate(values)}

    def read(operand):
        return held[operand] if operand in held else int(operand, 0)

    for line in re.findall(r"^\s*([a-z0-9.]+) ([^;{}]*(?:\{[^}]*\})?[^;]*);", text, re.MULTILINE):
        name, given = line[0], [part.strip() for part in line[1].split(",")]
        if name.startswith("cvt.rn.satfinite."):
            high, low = (converted(format, floats[operand]) for operand in given[1:])
            held[given[0]] = high << 8 | low
        elif name == "mov.b32":
            low, high = (read(operand.strip("{} ")) for operand in given[1:])
            held[given[0]] = high << 16 | low
        elif name == "prmt.b32":
            held[given[0]] = permuted(*map(read, given[1:]))
        elif name == "lop3.b32":
            held[given[0]] = lop3(*map(read, given[1:]))
        elif name in ("and.b32", "add.u32", "shr.u32"):
            one, other = map(read, given[1:])
            held[given[0]] = {"and": one & other, "add": one + other & 0xFFFFFFFF, "shr": one >> other}[name[:3]]
        else:
            assert name == ".reg", name
    return held["$0"]


@pytest.mark.parametrize("name", NAMES)
def test_the_assembly_encodes_like_the_reference(name):
    format = formats.get(NAMES[name])
    x = hard(400, torch.float32, format)
    x = torch.cat([x, x[:40].repeat_interleave(4), -x[:40].repeat_interleave(4)])  # each in each of four positions
    bits = [word & 0xFFFFFFFF for word in x.view(torch.int32).tolist()]
    expected = quant.encode(x, format, "nearest_even", "saturate").tolist()
    text = assembly(name)
    found = [run(text, format, bits[i : i + 4]).to_bytes(4, "little") for i in range(0, len(bits), 4)]
    assert list(b"".join(found)) == expected


@pytest.mark.parametrize("name", NAMES.values())
def test_the_assembly_for_masked_numbers_encodes_like_the_reference(name):
    format = formats.get(name)
    x = hard(400, torch.float32, format).nan_to_num(-0.0)
    bits = [word & 0xFFFFFFFF for word in x.view(torch.int32).tolist()]
    expected = quant.encode(x, format, "nearest_even", "saturate").tolist()
    text = assembly("_NUMBERS").replace("KIND", "e4m3")
    for i in range(0, len(bits), 4):
        code = int.from_bytes(bytes(expected[i : i + 4]), "little")
        for mask in (0xFFFFFFFF, 0, 0xFF00FFFF):
            assert run(text, format, [*bits[i : i + 4], mask]) == code & mask


@pytest.mark.parametrize(("right", "wrong"), [("high, $4, $3", "high, $3, $4"), ("code, $5", "code, $4")])
def test_a_swapped_operand_in_masked_encoding_is_detected(right, wrong, monkeypatch):
    text = assembly("_NUMBERS")
    assert right in text
    monkeypatch.setattr(f"{__name__}.assembly", lambda _: text.replace(right, wrong))
    with pytest.raises(AssertionError):
        test_the_assembly_for_masked_numbers_encodes_like_the_reference("float8_e4m3fn")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("_E4M3", "0x0073", "0x0037"),
        ("_E4M3", "0x80808080", "0x80808000"),
        ("_E4M3", "low, $2, $1", "low, $1, $2"),
        ("_E5M2", "0x04040404", "0x08040404"),
        ("_E5M2", "0x7610", "0x7601"),
    ],
)
def test_a_wrong_constant_in_encoding_is_detected(name, right, wrong, monkeypatch):
    text = assembly(name)
    assert right in text
    monkeypatch.setattr(f"{__name__}.assembly", lambda _: text.replace(right, wrong))
    with pytest.raises(AssertionError):
        test_the_assembly_encodes_like_the_reference(name)
