"""Number formats as data. This room imports nothing but the standard library."""

from functools import cache

from halfstep.errors import FormatError, unknown
from halfstep.formats.base import Format, ieee
from halfstep.registry import collect


__all__ = ["Format", "get", "ieee", "names"]


@cache
def _by_name() -> dict[str, Format]:
    members = collect("halfstep.formats", Format)
    table = dict(members)
    for member in members.values():
        for alias in member.aliases:
            if table.setdefault(alias, member) is not member:
                raise FormatError(f"{alias!r} names both {table[alias].name} and {member.name}; drop one alias")
    return table


def names() -> list[str]:
    """The formats' own names, widest first (aliases left out)."""
    distinct = set(_by_name().values())
    return [f.name for f in sorted(distinct, key=lambda f: (-f.bytes, -f.bits, f.name))]


def get(name: object) -> Format:
    """The format of that name or alias; a `torch.dtype` and a `Format` are accepted too.

    >>> get("e5m2").name
    'float8_e5m2'

    Raises:
        FormatError: no format has that name; the nearest ones are shown.
    """
    if isinstance(name, Format):
        return name
    key = str(name).removeprefix("torch.").lower()
    if key not in _by_name():
        raise FormatError(unknown("format", name, names()))
    return _by_name()[key]
