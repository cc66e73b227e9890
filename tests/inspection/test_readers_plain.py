"""Readers of single files return the same bits as the format's own library."""

import argparse
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, timedelta
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kinds import KINDS, arrays, bits, nested, npy, npz, npz_deflated, safetensors, stored_bits, tensors, torch_zip
from safetensors import safe_open

from families import for_each
from halfstep.inspection import files, open_checkpoint
from halfstep.inspection.inspector import readers


def by_name(checkpoint):
    return {tensor.name: tensor for tensor in checkpoint.tensors}


def same(checkpoint, stored, tensor):
    assert stored.shape == tuple(tensor.shape)
    assert stored.numel == tensor.numel()
    assert f"torch.{stored.dtype}" == str(tensor.dtype)
    assert stored.nbytes == tensor.numel() * tensor.element_size()
    return stored_bits(stored) == bits(tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_recognised_by_exactly_one_reader(kind, tmp_path):
    path = KINDS[kind](tmp_path)
    known = [name for name, reader in readers().items() if reader.recognises(path)]
    assert known == [open_checkpoint(path).kind]


def test_safetensors_equals_its_library(tmp_path):
    path = safetensors(tmp_path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata == {"format": "pt"}
    stored = by_name(checkpoint)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(stored) == set(tensors())
        assert all(same(checkpoint, stored[name], file.get_tensor(name)) for name in file.keys())  # noqa: SIM118


def test_safetensors_with_packed_types(tmp_path):
    """4- and 6-bit types are listed with the shape of their values and read as bytes."""
    header = b'{"a":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]},'
    header += b'"b":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[4,7]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcdefg")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    a, b = checkpoint.tensors
    assert (a.dtype, a.shape, stored_bits(a)) == ("float4_e2m1fn", (2, 4), b"abcd")
    assert (b.dtype, b.shape, stored_bits(b)) == ("float6_e2m3fn", (4,), b"efg")


SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The component tensors of each sparse layout."""


def leaves(value, name=""):
    """The tensors of a torch.load result, under the names that the reader gives them."""
    if isinstance(value, torch.Tensor) and value.layout in SPARSE:
        value = {part.strip("_"): getattr(value, part)() for part in SPARSE[value.layout]}
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}".removeprefix("."))


def test_torch_zip_equals_torch_load(tmp_path):
    path = torch_zip(tmp_path)
    checkpoint, wanted = open_checkpoint(path), dict(leaves(torch.load(path, weights_only=True)))
    stored = by_name(checkpoint)
    assert stored.keys() == wanted.keys()
    assert {"optimizer.state.0.exp_avg", "list.0", "views.turned", "tensors.float8_e8m0fnu"} <= stored.keys()
    for name, tensor in wanted.items():
        assert same(checkpoint, stored[name], tensor), name


@pytest.mark.filterwarnings("ignore:Sparse")  # torch warns that these layouts are in beta
@for_each("zipped", [True, False])
def test_sparse_tensors_of_every_layout(zipped, tmp_path):
    dense = torch.arange(32.0).reshape(4, 8) * (torch.arange(32).reshape(4, 8) % 3 == 0)
    blocks = {torch.sparse_bsr: (2, 4), torch.sparse_bsc: (2, 4)}
    held = {str(layout): dense.to_sparse(layout=layout, blocksize=blocks.get(layout)) for layout in SPARSE}
    torch.save(held, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    checkpoint, wanted = open_checkpoint(tmp_path / "a.pt"), dict(leaves(held))
    stored = by_name(checkpoint)
    assert stored.keys() == wanted.keys()
    assert all(same(checkpoint, stored[name], tensor) for name, tensor in wanted.items())
    assert stored["torch.sparse_bsr.values"].shape == held["torch.sparse_bsr"].values().shape


def test_namespaces_and_numpy_scalars_are_skipped(tmp_path):
    held = {"args": argparse.Namespace(lr=0.1), "loss": np.float64(0.5), 3: {None: torch.ones(1), 2**70: torch.ones(2)}}
    torch.save(held, tmp_path / "a.pt")
    assert list(by_name(open_checkpoint(tmp_path / "a.pt"))) == ["3.(NoneType)", "3.(int)"]


@for_each("zipped", [True, False])
def test_standard_library_objects_beside_tensors(zipped, tmp_path):
    """None of these can run code. Their tensors are listed; paths, slices and dates hold none."""
    log = defaultdict(list, {"loss": [torch.ones(3)]})
    log["empty"], weights = deque([torch.ones(4)], maxlen=9), {"w": torch.ones(5), "v": torch.ones(6)}
    held = {
        "log": log, "by default": defaultdict(None, a=torch.ones(1)),
        "factories": [defaultdict(kind) for kind in (int, float, str, set, dict, tuple, bool, bytes, OrderedDict)],
        "path": Path("a/b"), "pure": PureWindowsPath("c"),
        "set": frozenset({1, 2}), "slice": slice(1, None), "range": range(3), "seen": {frozenset({"a"})},
        "when": datetime(2024, 1, 2, tzinfo=UTC), "took": timedelta(seconds=3), "of": date(2024, 1, 2),
        "args": argparse.Namespace(lr=0.1, init=torch.ones(2)), "more": SimpleNamespace(init=torch.ones(7)),
        "dict": torch.nn.ParameterDict(weights), "list": torch.nn.ParameterList(weights.values()),
        "counts": Counter("ab"), "ordered": OrderedDict(a=torch.ones(8)),
    }  # fmt: skip
    torch.save(held, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert {name: one.numel for name, one in by_name(open_checkpoint(tmp_path / "a.pt")).items()} == {
        "log.loss.0": 3, "log.empty.0": 4, "by default.a": 1, "args.init": 2, "more.init": 7, "dict.w": 5, "dict.v": 6,
        "list.0": 5, "list.1": 6, "ordered.a": 8,
    }  # fmt: skip


def test_file_kind_is_recognised_by_content(tmp_path):
    for name, kind in (
        ("safetensors", "safetensors"),
        ("torch_zip", "torch zip"),
        ("npz", "numpy archive"),
        ("gguf", "GGUF"),
    ):
        KINDS[name](tmp_path).rename(tmp_path / "weights")
        assert open_checkpoint(tmp_path / "weights").kind == kind


def test_tied_tensors_share_a_storage_and_views_do_not(tmp_path):
    stored = by_name(open_checkpoint(torch_zip(tmp_path)))
    assert stored["model.a.weight"].storage == stored["model.b.weight"].storage
    held = torch.arange(6.0)
    torch.save({"whole": held, "again": held, "first": held[:3], "last": held[3:]}, tmp_path / "b.pt")
    found = {name: tensor.storage for name, tensor in by_name(open_checkpoint(tmp_path / "b.pt")).items()}
    assert found["whole"] == found["again"]
    assert len(set(found.values())) == 3


def test_file_of_one_tensor(tmp_path):
    torch.save(torch.arange(3), tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    assert [tensor.name for tensor in checkpoint.tensors] == ["tensor"]
    assert same(checkpoint, checkpoint.tensors[0], torch.arange(3))


@pytest.mark.parametrize("step", [64, 1 << 12, 1 << 22])
def test_strides_are_gathered_in_row_major_order(step, tmp_path):
    """Strided, transposed and expanded views; large ones are gathered in several slabs."""
    x = torch.randn(3, 50, 41)
    views = {"a": x.permute(2, 0, 1), "b": x[::2, 3:, 1::7], "c": x[:, :1].expand(3, 60, 41), "d": x.mT[1:, 4:30]}
    torch.save(views, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    for stored in checkpoint.tensors:
        assert stored_bits(stored, step) == bits(views[stored.name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 100, 1000])
def test_values_do_not_depend_on_map_and_gather_sizes(size, kind, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(KINDS[kind](tmp_path))
    wanted = [stored_bits(tensor) for tensor in checkpoint.tensors]
    monkeypatch.setattr(files, "_MAPPED", size)
    monkeypatch.setattr(files, "_GATHERED", max(size, 16))
    assert [stored_bits(tensor, 16) for tensor in checkpoint.tensors] == wanted


def test_slabs_cover_an_array_in_order(monkeypatch):
    x = np.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4)
    for limit in (1, 3, 8, 40, 100, 10_000):
        monkeypatch.setattr(files, "_GATHERED", limit * 8)
        parts = [x[tuple(slice(*bounds) for bounds in index)].reshape(-1) for index in files.slabs(x.shape, 8)]
        assert max(map(len, parts)) <= limit
        assert np.array_equal(np.concatenate(parts), x.reshape(-1))


def test_big_endian_torch_archive(tmp_path):
    """Bytes of an archive marked big-endian are swapped."""
    torch.save({"a": torch.arange(5.0)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            data = b"big" if info.filename.endswith("byteorder") else data
            data = np.arange(5, dtype=">f4").tobytes() if info.filename.endswith("data/0") else data
            new.writestr(info.filename, data)
    checkpoint = open_checkpoint(tmp_path / "b.pt")
    assert same(checkpoint, checkpoint.tensors[0], torch.arange(5.0))


@pytest.mark.parametrize("build", [npz, npz_deflated])
def test_npz_equals_numpys_loading(build, tmp_path):
    path = build(tmp_path)
    checkpoint = open_checkpoint(path)
    with np.load(path) as wanted:
        assert {tensor.name for tensor in checkpoint.tensors} == set(wanted.files)
        for stored in checkpoint.tensors:
            array = wanted[stored.name]
            assert (stored.shape, stored.dtype) == (array.shape, array.dtype.newbyteorder("=").name)
            assert stored_bits(stored) == np.ascontiguousarray(array, array.dtype.newbyteorder("=")).tobytes()


def test_npy_equals_numpys_loading(tmp_path):
    checkpoint = open_checkpoint(npy(tmp_path))
    (stored,) = checkpoint.tensors
    assert (stored.name, stored.shape, stored.dtype) == ("a", (4, 6), "float32")
    assert stored_bits(stored) == arrays()[">f4"].astype("<f4").tobytes()


def test_pieces_are_read_only_views_of_the_file(tmp_path):
    checkpoint = open_checkpoint(safetensors(tmp_path))
    piece = next(iter(by_name(checkpoint)["bfloat16"].chunks()))
    assert piece.dtype == np.uint16
    assert not piece.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        piece[0] = 1


def test_training_checkpoint_has_all_its_tensors(tmp_path):
    names = set(by_name(open_checkpoint(torch_zip(tmp_path))))
    assert {name for name, _ in leaves(nested())} == names
