"""Number formats as data. This package imports only the standard library."""

import re
from ast import literal_eval
from functools import cache
from typing import TypeVar, overload

from halfstep.constant import constant
from halfstep.errors import FormatError, unknown
from halfstep.formats.floating import BlockFormat, Float, Format, ieee
from halfstep.formats.integer import Integer
from halfstep.formats.lookup import Codebook, PowerOfTwo
from halfstep.formats.posit import Posit, posit
from halfstep.registry import collect


__all__ = [
    "BlockFormat", "Codebook", "Float", "Format", "Integer", "Posit", "PowerOfTwo",
    "as_constant", "block_names", "from_key", "get", "get_block", "ieee", "is_block", "names", "posit",
]  # fmt: skip

F = TypeVar("F", Format, BlockFormat)
K = TypeVar("K", bound=Format)


def _with_aliases(members: dict[str, F]) -> dict[str, F]:
    table = dict(members)
    for member in members.values():
        for alias in member.aliases:
            if table.setdefault(alias, member) is not member:
                raise FormatError(f"{alias!r} names both {table[alias].name} and {member.name}; drop one alias")
    return table


@cache
def _scalars() -> dict[str, Format]:
    return _with_aliases(collect("halfstep.formats", Format))  # type: ignore[type-abstract]


@cache
def _blocks() -> dict[str, BlockFormat]:
    return _with_aliases(collect("halfstep.formats", BlockFormat))


def names() -> list[str]:
    """The names of the scalar formats, widest first, without aliases."""
    return [f.name for f in sorted({*_scalars().values()}, key=lambda f: (-f.bytes, -f.bits, f.name))]


def block_names() -> list[str]:
    """The names of the block formats, widest first, without aliases."""
    return [f.name for f in sorted({*_blocks().values()}, key=lambda f: (-f.bits, f.name))]


@overload
def get(name: object) -> Format: ...


@overload
def get(name: object, kind: type[K]) -> K: ...


def get(name: object, kind: type[Format] = Format) -> Format:
    """The scalar format of that name or alias, of that kind; a `torch.dtype` and a `Format` are accepted too.

    `eXmY` names the IEEE-style float with X exponent and Y mantissa bits where nothing else has that name, `positN_ES`
    the posit of N bits.

    >>> get("e5m2").name
    'float8_e5m2'
    >>> get("e6m3").max
    4026531840.0

    Raises:
        FormatError: no format has that name (the nearest ones are shown), or it is of another kind.
    """
    format = name if isinstance(name, Format) else _find(name)
    if not isinstance(format, kind):
        raise FormatError(f"{format.name} is {_a(type(format))}; this needs {_a(kind)}")
    return format


def _find(name: object) -> Format:
    key = _key(name)
    if key in _scalars():
        return _scalars()[key]
    if made := re.fullmatch(r"e(\d{1,2})m(\d{1,2})", key):
        return ieee(key, int(made[1]), int(made[2]), "IEEE 754-2019's rule with this split of the bits")
    if made := re.fullmatch(r"posit(\d{1,2})_(\d)", key):
        return posit(int(made[1]), int(made[2]))
    if key in _blocks():
        raise FormatError(f"{key!r} is a block format, and this takes a scalar one: use halfstep.quantize or round_to")
    raise FormatError(unknown("format", name, {*names(), *block_names()}))


def get_block(name: object) -> BlockFormat:
    """The block format of that name or alias.

    >>> get_block("nvfp4").bits
    4.5

    Raises:
        FormatError: no block format has that name; the nearest ones are shown.
    """
    if isinstance(name, BlockFormat):
        return name
    if _key(name) not in _blocks():
        raise FormatError(unknown("block format", name, block_names()))
    return _blocks()[_key(name)]


@cache
def from_key(key: str) -> Format:
    """The format with this `Format.key`; its name is the key.

    >>> from_key(get("e4m3fn").key).max
    448.0
    """
    kind, _, rest = key.partition(" ")
    if kind == "float":
        exponent_bits, mantissa_bits, bias, specials = rest.split()
        return Float(key, int(exponent_bits), int(mantissa_bits), int(bias), specials, source="a key")
    if kind == "integer":
        return Integer(key, *map(int, rest.split()), source="a key")
    if kind == "posit":
        return posit(*map(int, rest.split()))
    if kind == "codebook":
        return Codebook(key, literal_eval(rest), source="a key")
    return PowerOfTwo(key, source="a key")


@constant
def as_constant(key: str) -> Format:
    """`from_key`, whose result a traced graph takes as a constant: `torch.compile(dynamic=True)` would make graph
    inputs of a format's floats, and fail."""
    return from_key(key)


def is_block(name: object) -> bool:
    """Whether `name` is a block format or the name of one.

    A codebook's name (`nf4`) means the codebook here, and its block format where a tensor is quantized.
    """
    return isinstance(name, BlockFormat) or (not isinstance(name, Format) and _key(name) in _blocks())


def _a(kind: type[Format]) -> str:
    return f"an {kind.__name__}" if kind.__name__[0] in "AEIOU" else f"a {kind.__name__}"


def _key(name: object) -> str:
    return str(name).removeprefix("torch.").lower()
