"""Files that are no checkpoints, and invalid safetensors, JSON and numpy headers, raise errors that say why."""

import json
import os
import struct

import numpy as np
import pytest
import torch
from kinds import KINDS, huggingface, safetensors, scan, stored_bits
from safetensors.torch import save_file
from watching import nothing_but_reading

from halfstep.errors import CheckpointError
from halfstep.inspection import files, inspector, open_checkpoint
from halfstep.inspection.files import TENSORS, TEXT


def assert_rejected(path, match):
    with nothing_but_reading(), pytest.raises(CheckpointError, match=match):
        scan(open_checkpoint(path))


def with_header(path, header, body=b"", length=None):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data) if length is None else length) + data + body)
    return path


def entry(shape=(1,), offsets=(0, 4), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize("make", ["nothing", "pipe", "text", "empty", "folder", "loop", "zero"])
def test_non_checkpoints_raise(make, tmp_path):
    path = tmp_path / "a.safetensors"
    wanted = "cannot be opened"
    if make == "pipe":
        os.mkfifo(path)
        wanted = "not a regular file"
    elif make == "text":
        path = tmp_path / "notes.txt"
        path.write_text("hello")
        wanted = "not a checkpoint of a known kind; expected one of: GGUF, Hugging Face folder"
    elif make == "empty":
        path.touch()
        wanted = "0 bytes"
    elif make == "folder":
        path.mkdir()
        wanted = "known kind"
    elif make == "loop":
        path.symlink_to(path)
    elif make == "zero":
        path.symlink_to("/dev/zero")
        wanted = "not a regular file"
    assert_rejected(path, wanted)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_impossible_file_names_raise(name):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint(name)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files_raise(kind, tmp_path):
    """A file cut at any length is rejected when it is opened or when its values are read."""
    path = KINDS[kind](tmp_path)
    files = [path] if path.is_file() else sorted(path.iterdir())
    for file in files:
        data = file.read_bytes()
        for length in {0, 1, 7, 8, 9, len(data) // 3, len(data) // 2, len(data) - 9, len(data) - 1}:
            file.write_bytes(data[:length])
            assert_rejected(path, ".")
        file.write_bytes(data)
    assert scan(open_checkpoint(path)) > 0


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        ({"a": entry()}, b"1234" * 2, "4 bytes behind the last tensor"),
        ({"a": entry()}, b"", "truncated"),
        ({"a": entry(), "b": entry()}, b"1234", "overlaps the tensor before it"),
        ({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456", "overlaps the tensor before it"),
        ({"a": entry(), "b": entry(offsets=(6, 10))}, b"1234567890", "leaves a gap before it"),
        ({"a": entry(offsets=(4, 0))}, b"1234", "-4 bytes for F32"),
        ({"a": entry(offsets=(-4, 0))}, b"1234", "expected lists of integers"),
        ({"a": entry(offsets=(0, 4, 8))}, b"1234", "expected lists of integers"),
        ({"a": entry(offsets=(0, 4.0))}, b"1234", "expected lists of integers"),
        ({"a": entry(offsets=(0, 10**30))}, b"1234", "expected lists of integers"),
        ({"a": entry(shape=(-1, -1))}, b"1234", "expected lists of integers"),
        ({"a": entry(shape=(True,))}, b"1234", "expected lists of integers"),
        ({"a": entry(shape=(1,) * 65)}, b"1234", "expected lists of integers"),
        ({"a": entry(shape=(HUGE, HUGE, 4))}, b"1234", "4 bytes for F32"),
        ({"a": entry(shape=(2**32, 2**32))}, b"1234", "4 bytes for F32"),
        ({"a": entry(shape=(2,))}, b"1234", "4 bytes for F32 of shape .2.; expected 8"),
        ({"a": entry(dtype="F16")}, b"1234", "4 bytes for F16"),
        ({"a": entry(dtype="F33")}, b"1234", "type 'F33'; expected one of F64"),
        ({"a": entry(dtype=["F32"])}, b"1234", "expected one of F64"),
        ({"a": entry(more=1)}, b"1234", "expected dtype, shape and data_offsets"),
        ({"a": [1]}, b"1234", "expected dtype, shape and data_offsets"),
        ({"a": None}, b"1234", "expected dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}}, b"", "not a map of strings"),
        ({"__metadata__": "a"}, b"", "not a map of strings"),
        (b'{"a": 1, "a": 2}', b"", "the key 'a' is there twice"),
        (b'{"a":' * 100_000, b"", "nests too deeply|not JSON"),
        (b"[" * 100_000, b"", "nests too deeply|not JSON"),
        (b"[]", b"", "a JSON list; expected an object"),
        (b"{", b"", "not JSON"),
        (b"\xff{}", b"", "not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", b"", "not JSON"),
        (b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234", "half a character"),
        (b'{"__metadata__":{"a":"\\udfff"}}', b"", "half a character"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_safetensors_headers_raise(header, body, message, tmp_path):
    assert_rejected(with_header(tmp_path / "a.safetensors", header, body), message)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, TEXT + 1, 1000])
def test_invalid_safetensors_header_lengths_raise(length, tmp_path):
    assert_rejected(with_header(tmp_path / "a.safetensors", b"{}", b"", length), "expected at most|truncated")


def test_header_of_too_many_objects_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PARSED", 1 << 20)
    for piece in (b"{}", b"[]", b"0"):
        header = b'{"a":[' + b",".join([piece] * (1 << 14)) + b"]}"
        assert_rejected(with_header(tmp_path / "a.safetensors", header), "MiB of memory; expected at most")


def test_too_many_tensors_raise(tmp_path, monkeypatch):
    monkeypatch.setattr("halfstep.inspection.files.TENSORS", 10)
    header = {str(i): entry(shape=(0,), offsets=(0, 0)) for i in range(11)}
    assert_rejected(with_header(tmp_path / "a.safetensors", header), "11 tensors; expected at most 10")
    assert TENSORS > 140_000


def test_tensor_names_are_unchanged(tmp_path):
    names = ["", "\x1b[2J", "a\nb", "../../etc/passwd", "é", "a" * 10_000]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "a.safetensors")
    assert {tensor.name for tensor in open_checkpoint(tmp_path / "a.safetensors").tensors} == set(names)


def test_duplicate_tensor_names_in_a_folder_raise(tmp_path):
    for name in "ab":
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    assert_rejected(tmp_path, "two tensors are called 'w'; open its files one by one")


def test_tensors_larger_than_their_files_raise(tmp_path, monkeypatch):
    monkeypatch.setattr(inspector, "SMALL", 1 << 16)
    torch.save(torch.ones(1).expand(1 << 20), tmp_path / "a.pt")
    assert_rejected(tmp_path / "a.pt", "claim 4194304 bytes and its files have .*; expected at most 64 times")
    np.savez_compressed(tmp_path / "b.npz", np.zeros(1 << 20))
    assert_rejected(tmp_path / "b.npz", "Save expanded tensors contiguous, and arrays uncompressed")


def test_file_truncated_after_opening_raises(tmp_path):
    path = safetensors(tmp_path)
    checkpoint = open_checkpoint(path)
    tensor = next(tensor for tensor in checkpoint.tensors if tensor.name == "float32")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="was changed while it was being read; open it again"):
        list(tensor.chunks())


def test_file_replaced_by_a_pipe_after_opening_raises(tmp_path):
    path = safetensors(tmp_path)
    checkpoint = open_checkpoint(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        list(checkpoint.tensors[0].chunks())


def test_file_that_shrinks_during_reading_raises(tmp_path, monkeypatch):
    """Files are checked before each map (4 KiB in this test); the file shrinks between the first and the second."""
    monkeypatch.setattr("halfstep.inspection.files._MAPPED", 1 << 12)
    save_file({"a": torch.ones(1 << 14)}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    pieces = checkpoint.tensors[0].chunks(1 << 12)
    next(pieces)
    os.truncate(tmp_path / "a.safetensors", 1 << 13)
    with pytest.raises(CheckpointError, match="was changed"):
        next(pieces)


OUTSIDE = ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "..\\secret.safetensors", "C:\\a", ""]


@pytest.mark.parametrize("name", OUTSIDE)
def test_index_paths_outside_the_folder_raise(name, tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    home = tmp_path / "home"
    home.mkdir()
    (home / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert_rejected(home, "expected one in its own folder")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000, "missing"])
def test_index_of_missing_files_raises(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert_rejected(tmp_path, "which is not there")


def test_links_out_of_the_folder_raise(tmp_path):
    """Links may only lead to the blobs beside a cache's snapshots, not to other folders or files of the cache."""
    home = tmp_path / "cache" / "snapshots" / "1"
    home.mkdir(parents=True)
    (tmp_path / "cache" / "blobs").mkdir()
    for target in (tmp_path / "secret.safetensors", tmp_path / "cache" / "refs.safetensors"):
        save_file({"a": torch.ones(1)}, target)
        (home / "model.safetensors").symlink_to(target)
        assert_rejected(home, "a link to .*, out of the folder")
        (home / "model.safetensors").unlink()
    save_file({"a": torch.ones(1)}, tmp_path / "cache" / "blobs" / "hash")
    (home / "model.safetensors").symlink_to("../../blobs/hash")
    assert scan(open_checkpoint(home)) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda home: (home / "model-2.safetensors").unlink(), "which is not there"),
        (lambda home: (home / "model-2.safetensors").write_bytes(b"git-lfs"), "expected a safetensors file"),
        (lambda home: (home / "config.json").write_text("[]"), "a JSON list"),
        (lambda home: (home / "config.json").write_text("[" * 100_000), "nests too deeply|not JSON"),
        (
            lambda home: save_file({"c": torch.ones(1)}, home / "model-2.safetensors"),
            "'b' is not in 'model-2.safetensors'",
        ),
        (lambda home: [file.unlink() for file in home.glob("*model*")], "a config.json without weights.*git lfs"),
        (lambda home: ((home / "config.json").unlink(), os.mkfifo(home / "config.json")), "not a regular file"),
    ],
)
def test_broken_folders_raise(change, message, tmp_path):
    home = huggingface(tmp_path)
    change(home)
    assert_rejected(home, message)


def test_bin_file_of_unknown_kind_raises(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"something else")
    assert_rejected(tmp_path, "neither a safetensors file nor one of torch.save")


def test_huge_json_files_raise(tmp_path):
    home = huggingface(tmp_path)
    os.truncate(home / "config.json", TEXT + 1)
    assert_rejected(home, "expected at most")


def header_of(text, version=1):
    data = text.encode("latin1")
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(data)) + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x93NUMPY", "does not begin"),
        (b"\x93NUMPY\x09\0" + bytes(20), "does not begin"),
        (b"\x93NUMPY\x01\0\xff\xff{}", "expected at most 10000"),
        (b"\x93NUMPY\x02\0\xff\xff\xff\xff{}", "expected at most 10000"),
        (header_of("__import__('os').system('touch sentinel')"), "does not describe an array"),
        (header_of("(" * 5000), "does not describe an array"),
        (header_of("-" * 9000 + "1"), "does not describe an array"),
        (header_of("{[]: 1}"), "does not describe an array"),
        (header_of("{'descr': '<f4', 'shape': (1,)}"), "expected type, order and shape"),
        (header_of("[1]"), "expected type, order and shape"),
        (header_of("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"), "Python objects, which can run code"),
        (header_of("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}"), "Python objects"),
        (header_of("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}"), "expected numbers"),
        (header_of("{'descr': '<f16', 'fortran_order': False, 'shape': (1,)}"), "expected numbers"),
        (header_of("{'descr': '', 'fortran_order': False, 'shape': (1,)}"), "expected numbers"),
        (header_of("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), "expected integers"),
        (header_of("{'descr': '<f4', 'fortran_order': False, 'shape': [1]}"), "expected integers"),
        (header_of("{'descr': '<f4', 'fortran_order': False, 'shape': (1,) * 3}"), "does not describe an array"),
        (header_of("{'descr': '<f4', 'fortran_order': False, 'shape': (9**99,)}"), "does not describe an array"),
        (header_of(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({HUGE}, {HUGE})}}"), "0 bytes for <f4"),
        (header_of("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}") + bytes(7), "7 bytes for <f4"),
        (header_of("{'descr': '<f4', 'fortran_order': True, 'shape': (2,)}", 2) + bytes(9), "9 bytes for <f4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_numpy_headers_raise(data, message, tmp_path):
    (tmp_path / "a.npy").write_bytes(data)
    assert_rejected(tmp_path / "a.npy", message)


def test_object_arrays_raise(tmp_path):
    class Runs:
        def __reduce__(self):
            return os.system, ("touch sentinel",)

    np.save(tmp_path / "a.npy", np.array([Runs()], object), allow_pickle=True)
    assert_rejected(tmp_path / "a.npy", "Python objects")
    np.savez(tmp_path / "a.npz", good=np.ones(2), bad=np.array([Runs()], object))
    assert_rejected(tmp_path / "a.npz", "array 'bad' holds Python objects")


def test_empty_tensors_and_scalars_are_read(tmp_path):
    save_file({"a": torch.ones(0, 5), "b": torch.tensor(3.0), "c": torch.ones(2, 0)}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    found = {tensor.name: (tensor.shape, tensor.numel, stored_bits(tensor)) for tensor in checkpoint.tensors}
    assert found == {"a": ((0, 5), 0, b""), "b": ((), 1, struct.pack("<f", 3)), "c": ((2, 0), 0, b"")}


def test_open_pipe_is_rejected_without_blocking(tmp_path):
    """Also a pipe with an open writer."""
    os.mkfifo(tmp_path / "a.gguf")
    other = os.open(tmp_path / "a.gguf", os.O_RDWR)
    try:
        assert_rejected(tmp_path / "a.gguf", "not a regular file")
    finally:
        os.close(other)
