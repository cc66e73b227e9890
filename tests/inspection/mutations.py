"""Randomly broken copies of checkpoints: flipped bits, pieces removed, repeated or moved, extreme header values."""

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from random import Random


EXTREMES = [0, 1, -1, 2, 3, 4, 8, 63, 64, 127, 128, 255, 256, 1 << 15, (1 << 16) - 1, 1 << 24, (1 << 31) - 1, 1 << 31]
EXTREMES += [
    (1 << 32) - 1,
    1 << 32,
    (1 << 53) + 1,
    (1 << 61) - 1,
    (1 << 62),
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    10**30,
]

VALUES = [
    None,
    True,
    False,
    0.5,
    -1.0,
    1e300,
    "",
    "a",
    "\x1b[31m",
    "../x",
    "/etc/passwd",
    "\ud800",
    [],
    {},
    [[]],
    "F32",
]
VALUES += ["BF16", "F4", "|O", "<f8", {"a": 1}, *EXTREMES]

HOSTILE = [
    b"cos\nsystem\n",
    b"cposix\nsystem\nX\x0e\0\0\0touch sentinel\x85R",
    b"cbuiltins\neval\n",
    b"(ios\nsystem\n",
    b"\x81",
]
HOSTILE += [
    b"R",
    b"b",
    b"}",
    b"]",
    b"(",
    b")",
    b"t",
    b"u",
    b"e",
    b"s",
    b"a",
    b"Q",
    b"0",
    b"h\0",
    b"q\0",
    b"N",
    b"\x85",
    b".",
]
HOSTILE += [b"\x93", b"\x94", b"ctorch\nload\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"]


def near_the_ends(random: Random, length: int) -> int:
    """A random position in `length` bytes, mostly near either end, where headers and tables are."""
    bound = random.choice([16, 256, 2048, length or 1])
    place = random.randrange(min(bound, length or 1))
    return place if random.random() < 0.7 else max(length - 1 - place, 0)


def flip(random: Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 5, 40]) if out else 0):
        out[near_the_ends(random, len(out))] ^= 1 << random.randrange(8)
    return bytes(out)


def truncate(random: Random, data: bytes) -> bytes:
    return data[: near_the_ends(random, len(data))]


def splice(random: Random, data: bytes) -> bytes:
    """The data with a piece of it inserted or overwritten elsewhere."""
    start, at = near_the_ends(random, len(data)), near_the_ends(random, len(data))
    piece = data[start : start + random.choice([1, 4, 8, 30, 300])] * random.choice([1, 1, 1, 50])
    return data[:at] + piece + data[at + random.choice([0, len(piece)]) :]


def cut(random: Random, data: bytes) -> bytes:
    at = near_the_ends(random, len(data))
    return data[:at] + data[at + random.choice([1, 4, 8, 100]) :]


def number(random: Random, data: bytes) -> bytes:
    """The data with an extreme value at a random position of the binary header."""
    form = random.choice(["<B", "<H", "<I", "<Q"])
    at, size = near_the_ends(random, len(data)), struct.calcsize(form)
    return data[:at] + struct.pack(form, random.choice(EXTREMES) % (1 << 8 * size)) + data[at + size :]


def digits(random: Random, data: bytes) -> bytes:
    """The data with a number in its text header replaced by an extreme value."""
    found = list(re.finditer(rb"\d+", data[:65536]))
    if not found:
        return data
    match = random.choice(found)
    return data[: match.start()] + str(random.choice(EXTREMES)).encode() + data[match.end() :]


def insert(random: Random, data: bytes) -> bytes:
    at = near_the_ends(random, len(data))
    return data[:at] + random.choice(HOSTILE) * random.choice([1, 1, 1, 1000]) + data[at:]


BLIND = [flip, flip, truncate, splice, cut, number, number, digits, insert]


def blind(random: Random, data: bytes) -> bytes:
    for _ in range(random.choice([1, 1, 2, 4])):
        data = random.choice(BLIND)(random, data)
    return data


def within_json(random: Random, found: object) -> object:
    """The same tree with one value, key or element replaced."""
    if isinstance(found, dict) and found and random.random() < 0.9:
        key = random.choice(list(found))
        new = dict(found)
        if random.random() < 0.15:
            new[random.choice(["", "a", "__metadata__", "dtype", "\x1b"])] = new.pop(key)
        else:
            new[key] = within_json(random, found[key])
        return new
    if isinstance(found, list) and found and random.random() < 0.8:
        at = random.randrange(len(found))
        return [*found[:at], within_json(random, found[at]), *found[at + random.choice([0, 1, 1, 1]) :]]
    return random.choice(VALUES)


def json_header(random: Random, data: bytes) -> bytes:
    """A safetensors file with a changed header of consistent length."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(within_json(random, json.loads(data[8 : 8 + length]))).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def json_file(random: Random, data: bytes) -> bytes:
    return json.dumps(within_json(random, json.loads(data))).encode()


def zip_member(random: Random, data: bytes) -> bytes:
    """A valid archive around a broken member."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        broken = random.choice([*old.namelist(), *[name for name in old.namelist() if name.endswith(".pkl")] * 50])
        for info in old.infolist():
            held = old.read(info)
            new.writestr(info.filename, blind(random, held) if info.filename == broken else held, info.compress_type)
    return buffer.getvalue()


def aware(name: str, data: bytes) -> Callable[[Random, bytes], bytes]:
    """The mutation that keeps this file's outer format valid so that inner parsers are reached, else `blind`."""
    if name.endswith(".json"):
        return json_file
    if name.endswith(".safetensors"):
        return json_header
    if data[:4] == b"PK\3\4" and not name.endswith(".distcp"):
        return zip_member
    return blind


def mutate(random: Random, name: str, data: bytes) -> bytes:
    """A broken copy of the file called `name`."""
    return random.choice([blind, aware(name, data)])(random, data)
