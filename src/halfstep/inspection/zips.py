"""Reads the table of contents of a zip archive, or of one inside a file, without reading its members.

The standard library's reader loads a table of any size into memory and trusts its offsets. Source: PKWARE, APPNOTE.TXT
6.3.10, sections 4.3 to 4.5.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.errors import CheckpointError
from halfstep.inspection.files import TENSORS, File


STORED, DEFLATED = 0, 8

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_TABLE = 32 << 20  # bytes of the longest table that is read


@dataclass(frozen=True, slots=True)
class Member:
    """One member: `packed` bytes from `start` of the file, which unpack to `size` bytes."""

    name: str
    start: int
    packed: int
    size: int
    method: int


def members(file: File, base: int = 0, length: int | None = None) -> dict[str, Member]:
    """The members by name of the archive in `length` bytes of `file` from `base` (default: the whole file).

    Raises:
        CheckpointError: it is not an archive, or is a broken one: members overlap, are outside of it, occur twice, are
            encrypted, or have names that leave the folder.
    """
    length = file.size - base if length is None else length
    file.within(base, length, "a zip archive")
    found: dict[str, Member] = {}
    with file.opened() as descriptor:
        table, start = _table(file, base, length)
        for name, member in _entries(file, table):
            if name in found:
                raise CheckpointError(f"{file.path}: the archive has two members {name!r}")
            where = base + member.start
            signature, *_, name_length, extra_length = _LOCAL.unpack(file.read_from(descriptor, where, _LOCAL.size))
            data = where + _LOCAL.size + name_length + extra_length
            if signature != b"PK\3\4" or data + member.packed > base + start:
                raise CheckpointError(f"{file.path}: member {name!r} does not lie where the archive says")
            found[name] = Member(name, data, member.packed, member.size, member.method)
    _check_apart(file, found)
    return found


def _table(file: File, base: int, length: int) -> tuple[bytes, int]:
    """The bytes of the table of contents and where it starts, relative to `base`."""
    tail_length = min(length, _END.size + (1 << 16) - 1)
    tail = file.read(base + length - tail_length, tail_length)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise CheckpointError(f"{file.path}: a zip archive without its end; it is truncated: copy it again")
    end = length - tail_length + at
    _, disk, table_disk, here, count, size, start, comment = _END.unpack_from(tail, at)
    if disk or table_disk or here != count or len(tail) - at - _END.size != comment:
        raise CheckpointError(
            f"{file.path}: a zip archive in parts, or with something behind it; expected a single one"
        )
    if 0xFFFF in (here, count) or 0xFFFFFFFF in (size, start):
        count, size, start, end = _table64(file, base, end)
    if size > _TABLE or count > TENSORS or start + size > end:
        raise CheckpointError(
            f"{file.path}: a zip archive of {count} members with a table of {size} bytes at {start}; expected at most "
            f"{TENSORS} members, {_TABLE} bytes, and the table before the end of the archive"
        )
    return file.read(base + start, size), start


def _table64(file: File, base: int, end: int) -> tuple[int, int, int, int]:
    """Count, size, start and end of the table of an archive of more than 4 GiB or 65,535 members."""
    if end < _LOCATOR.size:
        raise CheckpointError(f"{file.path}: a large zip archive without the locator of its table")
    signature, _, at, _ = _LOCATOR.unpack(file.read(base + end - _LOCATOR.size, _LOCATOR.size))
    if signature != b"PK\6\7" or at + _END64.size > end:
        raise CheckpointError(f"{file.path}: a large zip archive without the locator of its table")
    signature, *_, count, size, start = _END64.unpack(file.read(base + at, _END64.size))
    if signature != b"PK\6\6":
        raise CheckpointError(f"{file.path}: a large zip archive whose table is not where its locator says")
    return count, size, start, at


def _entries(file: File, table: bytes) -> Iterator[tuple[str, Member]]:
    """Name and entry of each member; `start` is that of its local header, relative to the archive."""
    at = 0
    while at < len(table):
        if len(table) - at < _ENTRY.size:
            raise CheckpointError(f"{file.path}: the zip archive's table ends within an entry")
        fields = _ENTRY.unpack_from(table, at)
        signature, flags, method, packed, size = fields[0], fields[3], fields[4], fields[8], fields[9]
        name_length, extra_length, comment_length, start = fields[10], fields[11], fields[12], fields[16]
        at += _ENTRY.size
        name, extra = table[at : at + name_length], table[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment_length
        if signature != b"PK\1\2" or at > len(table):
            raise CheckpointError(f"{file.path}: the zip archive's table is broken at byte {at}")
        size, packed, start = _sizes64(file, extra, size, packed, start)
        yield _name(file, name, flags), Member("", start, packed, size, method)


def _sizes64(file: File, extra: bytes, *values: int) -> tuple[int, ...]:
    """Size, packed size and start; a field of all ones is replaced by the 64-bit value in the extra field."""
    wanted = [value == 0xFFFFFFFF for value in values]
    if not any(wanted):
        return values
    at = 0
    while len(extra) - at >= 4:
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length >= 8 * sum(wanted) and len(extra) - at - 4 >= length:
            long = iter(struct.unpack_from(f"<{sum(wanted)}Q", extra, at + 4))
            return tuple(next(long) if large else value for value, large in zip(values, wanted, strict=True))
        at += 4 + length
    raise CheckpointError(f"{file.path}: a large member of the zip archive lacks its 64-bit size")


def _name(file: File, raw: bytes, flags: int) -> str:
    if flags & 1:
        raise CheckpointError(f"{file.path}: member {raw!r} is encrypted; save the checkpoint without")
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file.path}: a member is called {raw!r}, which is not UTF-8") from error
    if name.startswith("/") or ".." in name.replace("\\", "/").split("/"):
        raise CheckpointError(f"{file.path}: a member is called {name!r}, which leads out of the archive")
    return name


def _check_apart(file: File, found: dict[str, Member]) -> None:
    """Check that no two members share bytes, as in a zip bomb."""
    end = 0
    for member in sorted(found.values(), key=lambda member: (member.start, member.packed)):
        if member.start < end:
            raise CheckpointError(f"{file.path}: member {member.name!r} overlaps the one before it")
        end = member.start + member.packed
