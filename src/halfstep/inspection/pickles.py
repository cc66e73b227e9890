"""A pickle interpreter for tensors that can do nothing else.

It knows the opcodes that torch writes. It imports nothing and calls nothing but the functions of `allowed`, which make
records; any other name in a pickle is refused. Dictionaries stay lists of pairs, so that no key of the pickle is hashed
or compared, and every object counts against a memory budget. Source of the opcodes: CPython, Lib/pickletools.py.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from halfstep.errors import CheckpointError
from halfstep.inspection.files import PARSED


@dataclass(slots=True, eq=False)
class Pairs:
    """A dictionary of the pickle: its keys and values in order."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def text_keys(self) -> dict[str, Any]:
        """The values whose keys are strings; a later pair wins."""
        return {key: value for key, value in self.items if type(key) is str}


@dataclass(slots=True, eq=False)
class Record:
    """An object of the pickle: the arguments of its constructor, and its state."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class Name:
    """A global that the pickle refers to by module and name; `make` is the function that replaces a call of it."""

    name: str
    make: "Make | None"


Make = Callable[[tuple[Any, ...]], Any]
Allowed = Mapping[str, Make | None]


def load(data: bytes, allowed: Allowed, what: str, persistent: Make | None = None) -> Any:
    """The object that the pickle `data` describes, made of plain values, `Pairs` and results of `allowed`.

    `allowed` maps each "module.name" to the function that replaces a call of it, or None for names that are only passed
    on; "package.*" stands for all names of a package. `persistent` makes an object of a persistent id. Both get a tuple
    of arbitrary objects of the pickle and must check it.

    Raises:
        CheckpointError: the pickle refers to any other name, is broken, or describes more than the budget.
    """
    return _Machine(data, allowed, what, persistent).run()


def load_next(data: bytes, at: int, allowed: Allowed, what: str, persistent: Make | None = None) -> tuple[Any, int]:
    """The object of the pickle that begins at byte `at`, and the byte after its end; as `load`."""
    machine = _Machine(data, allowed, what, persistent)
    machine.at = at
    return machine.run(), machine.at


class _Machine:
    def __init__(self, data: bytes, allowed: Allowed, what: str, persistent: Make | None) -> None:
        self.data, self.allowed, self.what, self.persistent = data, allowed, what, persistent
        self.at = 0
        self.left = PARSED
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            opcode = self.take(1)[0]
            if opcode == 0x2E:  # STOP
                return self.pop()
            step = _STEPS.get(opcode)
            if step is None:
                raise self.broken(f"opcode {bytes([opcode])!r}, which torch does not write")
            self.spend(32)
            step(self)

    def broken(self, found: str) -> CheckpointError:
        return CheckpointError(f"{self.what}: byte {self.at} of the pickle has {found}; the file is broken or hostile")

    def spend(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise CheckpointError(f"{self.what}: the pickle describes more than {PARSED >> 20} MiB of objects")

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) != count:
            raise CheckpointError(f"{self.what}: the pickle ends in the middle; the file is truncated: copy it again")
        self.at += count
        return piece

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def blob(self, form: str) -> bytes:
        count = self.number(form)
        if not 0 <= count <= len(self.data) - self.at:
            raise self.broken(f"a string of {count} bytes")
        self.spend(64 + count)
        return self.take(count)

    def text(self, form: str) -> str:
        raw = self.blob(form)
        self.spend(0 if raw.isascii() else 3 * len(raw))
        return self.decode(raw)

    def decode(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self.broken(f"a string that is not UTF-8: {raw[:40]!r}") from error

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 1000)
        if end < 0:
            raise self.broken("a name without an end")
        return self.decode(self.take(end + 1 - self.at)[:-1])

    def whole(self) -> int | bool:
        text = self.line()
        if not text.removeprefix("-").isdecimal() or len(text) > 20:
            raise self.broken(f"an integer {text[:40]!r}")
        return text == "01" if text in ("00", "01") else int(text)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise self.broken("an operation on an empty stack")
        return self.stack.pop()

    def top(self) -> Any:
        value = self.pop()
        self.push(value)
        return value

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise self.broken("the end of a list that was not begun")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def collect(self, count: int) -> None:
        self.spend(40 + 8 * count)
        self.push(tuple(self.pop() for _ in range(count))[::-1])

    def collect_marked(self, make: Callable[[list[Any]], Any]) -> None:
        values = self.since_mark()
        self.spend(56 + 8 * len(values))
        self.push(make(values))

    def pairs(self, values: list[Any]) -> list[tuple[Any, Any]]:
        if len(values) % 2:
            raise self.broken("a key without a value")
        self.spend(40 * len(values))
        return list(zip(values[::2], values[1::2], strict=True))

    def dictionary(self) -> None:
        self.spend(128)
        self.push(Pairs(self.pairs(self.since_mark())))

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, Pairs):
            raise self.broken(f"items for a {_kind(target)}, which takes none")
        target.items.extend(self.pairs(values))

    def extend(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise self.broken(f"elements for a {_kind(target)}, which takes none")
        self.spend(8 * len(values))
        target.extend(values)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def empty(self, make: Callable[[], Any]) -> None:
        self.spend(128)
        self.push(make())

    def put(self, key: int) -> None:
        self.spend(96)
        self.memo[key] = self.top()

    def get(self, key: int) -> None:
        if key not in self.memo:
            raise self.broken(f"the memo {key}, which was not written")
        self.push(self.memo[key])

    def long(self, form: str) -> None:
        self.push(int.from_bytes(self.blob(form), "little", signed=True))

    def refer(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self.broken("a reference that is no name")
        full = f"{module}.{name}"
        known = full if full in self.allowed else f"{module.partition('.')[0]}.*"
        if known not in self.allowed:
            raise CheckpointError(
                f"{self.what} refers to {full[:200]!r}, expected only tensors; loading it can run code, so it was not "
                "loaded. If you trust where it comes from, load it with the library that wrote it and save its tensors "
                "as safetensors"
            )
        self.spend(64)
        self.push(Name(full, self.allowed[known]))

    def refer_stacked(self) -> None:
        name, module = self.pop(), self.pop()
        self.refer(module, name)

    def call(self) -> None:
        args, function = self.pop(), self.pop()
        if not isinstance(function, Name) or function.make is None or type(args) is not tuple:
            raise self.broken(f"a call of a {_kind(function)} with a {_kind(args)}")
        self.make(function.make, args)

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, Pairs):  # a state_dict carries an attribute, which holds no tensors
            raise self.broken(f"a state for a {_kind(target)}, which takes none")

    def look_up(self) -> None:
        if self.persistent is None:
            raise self.broken("a reference to something outside of it")
        identity = self.pop()
        if type(identity) is not tuple:
            raise self.broken(f"a persistent id that is a {_kind(identity)}")
        self.make(self.persistent, identity)

    def make(self, make: Make, args: tuple[Any, ...]) -> None:
        self.spend(256)
        try:
            self.push(make(args))
        except CheckpointError as error:
            raise CheckpointError(f"{self.what}: {error}") from error


def _kind(value: Any) -> str:
    return value.name[:200] if isinstance(value, Name | Record) else type(value).__name__


_STEPS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("0"): lambda m: m.pop(),
    ord("1"): lambda m: m.since_mark(),
    ord("2"): lambda m: m.push(m.top()),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    0x8A: lambda m: m.long("<B"),
    0x8B: lambda m: m.long("<i"),
    ord("G"): lambda m: m.push(m.number(">d")),
    ord("X"): lambda m: m.push(m.text("<I")),
    0x8C: lambda m: m.push(m.text("<B")),
    ord("U"): lambda m: m.push(m.text("<B")),  # a str of Python 2
    ord("T"): lambda m: m.push(m.text("<I")),
    ord("I"): lambda m: m.push(m.whole()),
    0x8D: lambda m: m.push(m.text("<Q")),
    ord("B"): lambda m: m.push(m.blob("<I")),
    ord("C"): lambda m: m.push(m.blob("<B")),
    0x8E: lambda m: m.push(m.blob("<Q")),
    0x96: lambda m: m.push(m.blob("<Q")),
    ord("}"): lambda m: m.empty(Pairs),
    ord("]"): lambda m: m.empty(list),
    ord(")"): lambda m: m.push(()),
    0x8F: lambda m: m.empty(list),  # a set, whose elements are not hashed either
    ord("t"): lambda m: m.collect_marked(tuple),
    0x85: lambda m: m.collect(1),
    0x86: lambda m: m.collect(2),
    0x87: lambda m: m.collect(3),
    ord("l"): lambda m: m.collect_marked(list),
    0x91: lambda m: m.collect_marked(list),
    ord("d"): lambda m: m.dictionary(),
    ord("a"): lambda m: m.extend([m.pop()]),
    ord("e"): lambda m: m.extend(m.since_mark()),
    0x90: lambda m: m.extend(m.since_mark()),
    ord("s"): lambda m: m.set_item(),
    ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("q"): lambda m: m.put(m.number("<B")),
    ord("r"): lambda m: m.put(m.number("<I")),
    0x94: lambda m: m.put(len(m.memo)),
    ord("h"): lambda m: m.get(m.number("<B")),
    ord("j"): lambda m: m.get(m.number("<I")),
    ord("c"): lambda m: m.refer(m.line(), m.line()),
    0x93: lambda m: m.refer_stacked(),
    ord("R"): lambda m: m.call(),
    0x81: lambda m: m.call(),  # NEWOBJ: the allowed functions make the same of a class
    ord("b"): lambda m: m.build(),
    ord("Q"): lambda m: m.look_up(),
}
