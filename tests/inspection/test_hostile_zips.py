"""Zip archives with invalid tables: bombs, overlapping members, paths outside the archive, 64-bit sizes."""

import io
import struct
import zipfile

import numpy as np
import pytest
import torch
from kinds import npz_deflated, scan, torch_zip
from watching import nothing_but_reading

from halfstep.errors import CheckpointError
from halfstep.inspection import open_checkpoint
from halfstep.inspection.files import File
from halfstep.inspection.zips import members


def assert_rejected(path, match):
    with nothing_but_reading(), pytest.raises(CheckpointError, match=match):
        scan(open_checkpoint(path))


def fields(data, entry=0):
    """The positions of the central entry number `entry` and of the end record."""
    at = -1
    for _ in range(entry + 1):
        at = data.index(b"PK\1\2", at + 1)
    return at, data.rindex(b"PK\5\6")


def patched(path, *changes):
    data = bytearray(path.read_bytes())
    for at, form, value in changes:
        struct.pack_into(form, data, at, value)
    path.write_bytes(data)
    return path


def plain(path, **held):
    with zipfile.ZipFile(path, "w") as file:
        for name, data in held.items():
            file.writestr(name + ".npy", data)
    return path


def array(count=4):
    buffer = io.BytesIO()
    np.save(buffer, np.arange(count, dtype=np.float32))
    return buffer.getvalue()


def test_table_equals_the_standard_librarys(tmp_path):
    """Archives of torch and zipfile, with a comment, with 64-bit sizes, and inside another file."""
    paths = [torch_zip(tmp_path), npz_deflated(tmp_path), tmp_path / "c.zip"]
    with zipfile.ZipFile(paths[2], "w") as file:
        file.comment = b"PK\5\6 a comment"[4:]
        with file.open("large.npy", "w", force_zip64=True) as member:
            member.write(array())
    for path in paths:
        with zipfile.ZipFile(path) as file:
            wanted = {
                info.filename: (info.file_size, info.compress_size, info.compress_type) for info in file.infolist()
            }
        found = members(File.of(path))
        assert {name: (held.size, held.packed, held.method) for name, held in found.items()} == wanted
        inside = tmp_path / "inside"
        data = path.read_bytes()
        inside.write_bytes(b"before" + data + b"behind")
        moved = members(File.of(inside), 6, len(data))
        assert {name: held.start - 6 for name, held in moved.items()} == {
            name: held.start for name, held in found.items()
        }


@pytest.mark.slow
def test_more_than_65535_members(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for i in range(1 << 16):
            file.writestr(f"{i}", b"")
    assert len(members(File.of(tmp_path / "a.zip"))) == 1 << 16


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (8, "<H", 1, "encrypted"),
        (10, "<H", 12, "packed in a way"),
        (20, "<L", 1 << 30, "does not lie where|lies"),
        (20, "<L", 10, "packed in a way"),
        (24, "<L", 10, "packed in a way"),
        (24, "<L", 0xFFFFFFFF, "lacks its 64-bit size"),
        (28, "<H", 0xFFFF, "broken at byte"),
        (30, "<H", 0xFFFF, "broken at byte"),
        (32, "<H", 0xFFFF, "broken at byte"),
        (42, "<L", 1, "does not lie where"),
        (42, "<L", 1 << 30, "should lie at bytes"),
        (46, "<B", 0xFF, "not UTF-8"),
        (0, "<B", 0, "broken at byte"),
    ],
)
def test_invalid_central_entries_are_rejected(offset, form, value, message, tmp_path):
    path = plain(tmp_path / "a.npz", a=array(), b=array())
    at, _ = fields(path.read_bytes())
    assert_rejected(patched(path, (at + offset, form, value)), message)


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (4, "<H", 1, "in parts"),
        (8, "<H", 1, "in parts"),
        (12, "<L", 1 << 30, "the table before the end"),
        (12, "<L", 3, "within an entry"),
        (16, "<L", 1 << 30, "the table before the end"),
        (16, "<L", 0xFFFFFFFF, "locator"),
        (20, "<H", 9, "something behind"),
        (0, "<B", 0, "without its end"),
    ],
)
def test_invalid_end_records_are_rejected(offset, form, value, message, tmp_path):
    path = plain(tmp_path / "a.npz", a=array(), b=array())
    _, end = fields(path.read_bytes())
    assert_rejected(patched(path, (end + offset, form, value)), message)


def test_invalid_zip64_records_are_rejected(tmp_path):
    path = plain(tmp_path / "a.npz", a=array())
    data = path.read_bytes()
    _, end = fields(data)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1 << 60, 1 << 60, 1 << 60, 1 << 60)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    path.write_bytes(data[:end] + end64 + locator + data[end:])
    patched(path, (len(path.read_bytes()) - 6, "<L", 0xFFFFFFFF))
    assert_rejected(path, f"{1 << 60} members")
    patched(path, (end + len(end64) + 8, "<Q", 1 << 62))
    assert_rejected(path, "locator")
    patched(path, (end + len(end64) + 8, "<Q", 0))
    assert_rejected(path, "not where its locator says")


def test_duplicate_member_names_are_rejected(tmp_path):
    path = plain(tmp_path / "a.npz", a=array(), b=array())
    at, _ = fields(path.read_bytes(), 1)
    assert_rejected(patched(path, (at + 46, "<B", ord("a"))), "two members 'a.npy'")


def test_overlapping_members_are_rejected(tmp_path):
    """David Fifield's bomb: many table entries for one member."""
    path = plain(tmp_path / "a.npz", a=array(), b=array())
    data = path.read_bytes()
    (first, _), (second, _) = fields(data), fields(data, 1)
    (start,) = struct.unpack_from("<L", data, first + 42)
    assert_rejected(patched(path, (second + 42, "<L", start)), "overlaps")


@pytest.mark.parametrize("name", ["/etc/passwd.npy", "../a.npy", "x/../../a.npy", "..\\a.npy"])
def test_member_paths_outside_the_archive_are_rejected(name, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr(name, array())
    assert_rejected(tmp_path / "a.npz", "leads out of the archive")


@pytest.mark.parametrize("member", ["data.pkl", "data/0", "byteorder"])
def test_compressed_members_of_torch_files_are_rejected(member, tmp_path):
    torch.save({"a": torch.zeros(10_000)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for info in old.infolist():
            packed = info.filename.endswith(member)
            new.writestr(info.filename, old.read(info), zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
    assert_rejected(tmp_path / "b.pt", "compressed")


def test_torch_archives_need_exactly_one_pickle(tmp_path):
    for names, message in ((["a/x"], "0 members data.pkl"), (["a/data.pkl", "b/data.pkl"], "2 members data.pkl")):
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
            for name in names:
                file.writestr(name, b"N.")
        assert_rejected(tmp_path / "a.pt", message)


def test_unknown_byte_order_is_rejected(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("a/data.pkl", b"N.")
        file.writestr("a/byteorder", b"middle")
    assert_rejected(tmp_path / "a.pt", "expected little or big")


def deflated(path, data, claims):
    """An archive of one compressed array whose entry states `claims` bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.npy", data)
    at, _ = fields(path.read_bytes())
    return patched(path, (at + 24, "<L", claims))


def test_compressed_arrays_of_wrong_length_are_rejected(tmp_path):
    good = array(1000)
    more = good + bytes(1 << 20)
    assert_rejected(deflated(tmp_path / "a.npz", more, len(good)), "longer than its array")
    claimed = good.replace(b"(1000,)", b"(9999,)")
    assert_rejected(deflated(tmp_path / "b.npz", claimed, len(claimed) + 4 * 8999), "ends early")
    path = deflated(tmp_path / "c.npz", good, len(good))
    start = members(File.of(path))["a.npy"].start
    assert_rejected(patched(path, (start + 300, "<Q", 2**64 - 1)), "is broken|ends early|longer")


def test_compressed_fortran_order_is_rejected(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", np.asfortranarray(np.ones((3, 4))))
    assert_rejected(tmp_path / "a.npz", "column by column; save it in C order")


def test_archives_without_a_table_are_rejected(tmp_path):
    path = torch_zip(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    assert_rejected(path, "without its end; it is truncated")
