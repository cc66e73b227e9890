"""Pickles that would run code, write files, loop or exhaust memory are rejected by name without side effects."""

import os
import pickle
import random
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from kinds import distributed
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from watching import nothing_but_reading

import halfstep
from halfstep.errors import CheckpointError
from halfstep.inspection import open_checkpoint, pickles, torch_objects
from halfstep.inspection.readers import torch_zip


def archive(path, pickled: bytes, storages=(), prefix="archive/", **members):
    """A zip archive as torch.save writes it, around the given pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{prefix}data.pkl", pickled)
        for name, data in {**{f"data/{i}": data for i, data in enumerate(storages)}, **members}.items():
            file.writestr(prefix + name, data)
    return path


def assert_rejected(path, match):
    with nothing_but_reading(), pytest.raises(CheckpointError, match=match) as caught:
        open_checkpoint(path)
    return str(caught.value)


class Calls:
    """An object that pickles to a call of any function."""

    def __init__(self, function, *args):
        self.made = function, args

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (Calls(os.system, "touch sentinel"), "posix.system"),
        (Calls(eval, "open('sentinel', 'w')"), "eval"),
        (Calls(exec, "open('sentinel', 'w')"), "exec"),
        (Calls(open, "sentinel", "w"), "open"),
        (Calls(getattr, 3, "real"), "getattr"),
        (Calls(__import__, "os"), "__import__"),
        (Calls(torch.load, "sentinel"), "torch.serialization.load"),
        (Calls(torch.hub.load, "a", "b"), "torch.hub.load"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (Calls(pickle.loads, b"N."), "loads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_non_tensors_are_rejected_by_name(made, name, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"weight": [made]}, protocol)
    message = assert_rejected(archive(tmp_path / "a.pt", data), "expected only tensors")
    assert name in message
    assert "save its tensors as safetensors" in message
    assert not (tmp_path / "sentinel").exists()


def test_pickled_module_is_rejected(tmp_path):
    torch.save(torch.nn.Sequential(torch.nn.Linear(1, 1)), tmp_path / "a.pt")
    assert_rejected(tmp_path / "a.pt", r"refers to 'torch.nn.modules.container.Sequential', expected only tensors")


def test_distributed_metadata_that_would_run_code_is_rejected(tmp_path):
    path = distributed(tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps(Calls(os.system, "touch sentinel")))
    assert_rejected(path, "posix.system")


def test_distributed_part_that_would_run_code_is_rejected(tmp_path):
    """Parts contain pickles of their own, which are read together with the values."""
    path = distributed(tmp_path)
    file = next(path.glob("*.distcp"))
    data = file.read_bytes()
    assert data.count(b"ctorch._utils\n_rebuild_tensor_v2\n") > 0
    file.write_bytes(data.replace(b"ctorch._utils\n_rebuild_tensor_v2\n", b"cposix_utils\nsystem_tensor_xx_v2\n"))
    checkpoint = open_checkpoint(path)
    with nothing_but_reading(), pytest.raises(CheckpointError, match=r"posix_utils.system_tensor_xx_v2"):
        list(checkpoint.tensors[0].chunks())


def test_memory_format_pickled_by_getattr_is_read():
    """Older Pythons pickle it by getattr; getattr of anything else or with other arguments is rejected."""
    member = Calls(getattr, _MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    found = pickles.load(pickle.dumps(member, 4), torch_zip.ALLOWED, "it")
    assert found.name.endswith("._MEM_FORMAT_ENCODING")
    assert found.args == ("TORCH_CONTIGUOUS_FORMAT",)
    for hostile in (Calls(getattr, Metadata, "__init__"), Calls(getattr, member, "value"), Calls(getattr, member)):
        with pytest.raises(CheckpointError, match="getattr of something other than a memory format"):
            pickles.load(pickle.dumps(hostile, 4), torch_zip.ALLOWED, "it")


def test_bare_pickles_are_rejected(tmp_path):
    (tmp_path / "a.bin").write_bytes(pickle.dumps(Calls(os.system, "touch sentinel")))
    assert_rejected(tmp_path / "a.bin", r"bare pickle.*weights_only=True")


def legacy(path, made):
    torch.save(made, path, _use_new_zipfile_serialization=False)
    return path


def test_legacy_file_that_would_run_code_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = {"weight": torch.ones(3), "hook": Calls(os.system, "touch sentinel")}
    assert "posix.system" in assert_rejected(legacy(tmp_path / "a.pt", made), "expected only tensors")
    assert_rejected(legacy(tmp_path / "b.pt", torch.nn.Linear(1, 1)), "refers to 'torch.nn.modules.linear.Linear'")
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"M\xe9\x03.", b"M\xe8\x03.", "version 1000"),
        (b"little_endianq\x02\x88", b"little_endianq\x02N", "version 1001 of torch's old format"),
        (struct.pack("<q", 5) + b"\0\0\x80?", struct.pack("<q", 6) + b"\0\0\x80?", "a storage of 6 values"),
        (struct.pack("<q", 5) + b"\0\0\x80?", struct.pack("<q", -1) + b"\0\0\x80?", "a storage of"),
        (b"K\x05\x85", b"K\x07\x85", "reach behind the end"),
    ],
)
def test_broken_legacy_files_raise(old, new, message, tmp_path):
    data = legacy(tmp_path / "a.pt", {"weight": torch.ones(5)}).read_bytes()
    assert old in data
    (tmp_path / "a.pt").write_bytes(data.replace(old, new))
    assert_rejected(tmp_path / "a.pt", message)
    (tmp_path / "a.pt").write_bytes(data[:-1])
    assert_rejected(tmp_path / "a.pt", "truncated")


def test_python_2_strings_are_read(tmp_path):
    """As in lpips's files: byte strings for names, and an integer on a line."""
    data = legacy(tmp_path / "a.pt", {"weight": torch.ones(5), "n": 77777}).read_bytes()
    old = data.replace(b"X\6\0\0\0weight", b"U\6weight").replace(b"J\xd1/\1\0", b"I77777\n")
    assert len(old) == len(data) - 3 + 2
    (tmp_path / "a.pt").write_bytes(old)
    assert [(t.name, t.shape) for t in open_checkpoint(tmp_path / "a.pt").tensors] == [("weight", (5,))]
    (tmp_path / "a.pt").write_bytes(old.replace(b"I77777\n", b"I7x777\n"))
    assert_rejected(tmp_path / "a.pt", "an integer '7x777'")


def opcodes(*parts):
    return b"".join(part if isinstance(part, bytes) else bytes([part]) for part in parts)


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


STORAGE = opcodes(b"(", b"X\7\0\0\0storage", name("torch", "FloatStorage"), b"X\1\0\0\x000", b"N", b"K\4", b"tQ")
REBUILD = name("torch._utils", "_rebuild_tensor_v2")


def tensor(offset=b"K\0", size=b"K\4\x85", stride=b"K\1\x85", storage=STORAGE, rebuild=REBUILD):
    return opcodes(rebuild, b"(", storage, offset, size, stride, b"\x89N", b"tR")


def test_handwritten_pickle_is_valid(tmp_path):
    checkpoint = open_checkpoint(archive(tmp_path / "a.pt", tensor() + b".", [bytes(16)]))
    assert [(t.dtype, t.shape) for t in checkpoint.tensors] == [("float32", (4,))]


LONG = b"\x8b" + struct.pack("<i", 4000) + b"\x7f" * 4000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends in the middle"),
        (b"\x80", "ends in the middle"),
        (b"(", "ends in the middle"),
        (b".", "empty stack"),
        (b"0.", "empty stack"),
        (b"(.", "empty stack"),
        (b"t.", "was not begun"),
        (b"h\7.", "the memo 7"),
        (b"q\0.", "empty stack"),
        (b"K\1b.", "empty stack"),
        (b"K\1K\2b.", "a state for a int"),
        (b"]Nb.", "a state for a list"),
        (b"]K\1K\2s.", "items for a list"),
        (b"}(K\1u.", "a key without a value"),
        (b"(K\1d.", "a key without a value"),
        (b"}K\1a.", "elements for a Pairs"),
        (b"N(K\1e.", "elements for a NoneType"),
        (b"N)R.", "a call of a NoneType"),
        (name("collections", "OrderedDict") + b"NR.", "a call of a collections.OrderedDict with a NoneType"),
        (name("torch", "float32") + b")R.", "a call of a torch.float32"),
        (name("torch", "FloatStorage") + b")\x81.", "a call of a torch.FloatStorage"),
        (STORAGE + b"Nb.", "a state for a Storage"),
        (tensor() + b"Nb.", "a state for a View"),
        (tensor() + b"K\1a.", "elements for a View"),
        (tensor() + b"K\1K\2s.", "items for a View"),
        (name("collections", "OrderedDict") + b"K\1\x85R.", "a dictionary is made of"),
        (name("collections", "defaultdict") + b"K\1\x85R.", "a dictionary is made of"),
        (name("builtins", "list") + b")R.", "a call of a builtins.list"),
        (name("pathlib", "Path") + b")RK\1K\2s.", "items for a NoneType"),
        (name("torch._utils", "_rebuild_parameter") + b"N\x85R.", "a parameter is made of"),
        (name("torch._utils", "_rebuild_sparse_tensor") + b"NN\x86R.", "a sparse tensor is made of"),
        (REBUILD + b")R.", "a tensor is made of"),
        (tensor(storage=b"N"), "a tensor is made of"),
        (tensor(size=b"J\xff\xff\xff\xff\x85"), "a tensor is made of"),
        (tensor(size=LONG + b"\x85"), "a tensor is made of"),
        (tensor(stride=b"J\xff\xff\xff\xff\x85"), "a tensor is made of"),
        (tensor(size=b"K\1K\1\x86"), "a tensor is made of"),
        (tensor(size=b"\x88\x85"), "a tensor is made of"),
        (tensor(size=b"(" + b"K\1" * 65 + b"t", stride=b"(" + b"K\1" * 65 + b"t"), "a tensor is made of"),
        (tensor(size=b"K\5\x85") + b".", "reach behind the end"),
        (tensor(stride=b"K\2\x85") + b".", "reach behind the end"),
        (tensor(offset=b"K\1") + b".", "reach behind the end"),
        (tensor(offset=LONG) + b".", "a tensor is made of"),
        (tensor(storage=STORAGE.replace(b"K\4", b"K\5")) + b".", "a storage of 16 bytes; expected 5"),
        (tensor(storage=STORAGE.replace(b"K\4", LONG)) + b".", "a persistent id is made of"),
        (tensor(storage=STORAGE.replace(b"\x000", b"\0/")) + b".", "is not in the archive"),
        (tensor(storage=STORAGE.replace(b"Float", b"QInt8")) + b".", "torch.QInt8Storage"),
        (b"NQ.", "a persistent id that is a NoneType"),
        (b")Q.", "a persistent id is made of"),
        (b"X\xff\xff\xff\x7fabc.", "a string of"),
        (b"\x8d" + b"\xff" * 8 + b".", "a string of"),
        (b"\x8b\xff\xff\xff\xff.", "a string of -1"),
        (b"X\2\0\0\0\xff\xff.", "not UTF-8"),
        (b"c" + b"a" * 2000 + b".", "a name without an end"),
        (b"NN\x93.", "a reference that is no name"),
        (b"(ios\nsystem\n.", "opcode b'i'"),
        (b"(cos\nsystem\no.", "os.system"),
        (b"\x82\1.", "opcode"),
        (b"L99L\n.", "opcode b'L'"),
        (b"P1\n.", "opcode b'P'"),
        (b"\x92.", "opcode"),
    ],
)
def test_malformed_pickles_raise(data, message, tmp_path):
    assert_rejected(archive(tmp_path / "a.pt", data, [bytes(16)]), message)


def test_conjugate_views_are_rejected(tmp_path):
    torch.save(torch.ones(2, dtype=torch.complex64).conj(), tmp_path / "a.pt")
    assert_rejected(tmp_path / "a.pt", "resolve_conj")


def test_nested_rebuild_calls_are_rejected(tmp_path):
    rebuild = name("torch._tensor", "_rebuild_from_type_v2")
    twice = opcodes(rebuild, b"(", rebuild, name("torch", "Tensor"), b")N", b"tR.")
    assert_rejected(archive(tmp_path / "a.pt", twice), "a tensor with attributes is made of")


def test_self_referencing_dictionary_is_rejected(tmp_path):
    assert_rejected(archive(tmp_path / "a.pt", b"}q\0X\1\0\0\0ah\0s."), "nested 65 deep")


def test_exponentially_nested_lists_are_rejected(tmp_path, monkeypatch):
    """Forty nested lists that each hold the previous one twice are 2^40 elements in 200 bytes."""
    monkeypatch.setattr(torch_objects, "_OBJECTS", 10_000)
    data = b"]q\0K\1a" + b"".join(b"]q%c(h%ch%ce" % (i, i - 1, i - 1) for i in range(1, 41)) + b"."
    assert_rejected(archive(tmp_path / "a.pt", data), "objects nested")


def test_names_of_excessive_total_length_are_rejected(tmp_path):
    """A key of one megabyte over a thousand tensors would give a gigabyte of names."""
    long = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20)
    inner = b"}(" + b"".join(b"M" + struct.pack("<H", i) + b"h\0" for i in range(1000)) + b"u"
    data = tensor() + b"q\x000}" + long + inner + b"s."
    assert_rejected(archive(tmp_path / "a.pt", data, [bytes(16)]), "characters of names")


@pytest.mark.parametrize(
    "piece", [b"}", b"]", b")", b"N", b"]q\0", b"X\0\0\0\0", b"(", b"K\1\x85", b"G" + bytes(8), b"\x8f"]
)
def test_parsed_objects_count_against_the_memory_limit(piece, monkeypatch):
    """Parsing stops before the objects of any pickle take more memory than the limit."""
    limit = 1 << 18
    monkeypatch.setattr(pickles, "PARSED", limit)
    data = piece * (limit // 16)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="describes more than"):
        pickles.load(data, {}, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * limit


def test_keys_are_never_hashed():
    """Keys with equal hashes would take hours in a dictionary."""
    same = [i * (2**61 - 1) for i in range(20_000)]
    keys = b"".join(b"\x8a\x0c" + key.to_bytes(12, "little") + b"N" for key in same)
    assert [key for key, _ in pickles.load(b"}(" + keys + b"u.", {}, "x").items] == same


def test_random_states_are_skipped_with_a_remark(tmp_path):
    """As transformers saves them; numpy's state lies inside the pickle."""
    saved = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    for legacy_too in (True, False):
        torch.save(saved, tmp_path / "rng_state.pth", _use_new_zipfile_serialization=legacy_too)
        with nothing_but_reading():
            checkpoint = open_checkpoint(tmp_path / "rng_state.pth")
        assert [tensor.name for tensor in checkpoint.tensors] == ["cpu"]
        assert checkpoint.remarks == ("not read: numpy arrays inside the pickle: 'numpy.1'",)


def test_inner_tensors_of_torchao_subclasses_are_read(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    torch.save(model.state_dict(), tmp_path / "a.pt")
    with nothing_but_reading():
        checkpoint = open_checkpoint(tmp_path / "a.pt")
    shapes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors}
    assert shapes["0.weight_qdata"] == ("int8", (32, 64))
    (found,) = halfstep.inspect(tmp_path / "a.pt").schemes
    assert (found.scheme, found.text) == ("torchao", "int8 codes with a float32 scale for each row")
