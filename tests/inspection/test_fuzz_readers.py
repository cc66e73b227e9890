"""For any bytes, a reader either reads or raises CheckpointError, and has no side effects."""

import json
import struct
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, strategies as st
from kinds import KINDS, scan
from mutations import HOSTILE, mutate
from watching import nothing_but_reading

from halfstep.errors import CheckpointError
from halfstep.inspection import open_checkpoint, pickles
from halfstep.inspection.readers.torch_zip import ALLOWED
from halfstep.inspection.torch_objects import TENSORS, storage, views


def read_or_reject(path):
    with nothing_but_reading(), suppress(CheckpointError):
        scan(open_checkpoint(path))


@pytest.fixture(scope="module", params=KINDS)
def home(request, tmp_path_factory):
    """The path of a checkpoint of each kind, and its files with their bytes."""
    path = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    folder = path if path.is_dir() else path.parent
    return path, {file: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.quick("safetensors", "huggingface", "gguf")
@given(seed=st.integers(0, 2**32))
def test_mutated_checkpoints_are_read_or_rejected(home, seed):
    path, files = home
    random = Random(seed)
    file = random.choice(list(files))
    broken = mutate(random, file.name, files[file])
    file.write_bytes(broken)
    try:
        read_or_reject(path)
        assert file.read_bytes() == broken
        assert {found.name for found in file.parent.iterdir()} == {found.name for found in files}
    finally:
        file.write_bytes(files[file])


NUMBERS = st.one_of(st.integers(-3, 40), st.integers(0, 2**70))
TREES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)
)
NAMES = ["", "a", "b", "\x1b[2J", "__metadata__", "\ud800"]
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F99"]) | TREES,
        "shape": st.lists(st.integers(0, 5), max_size=3) | TREES,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | TREES,
    },
    optional={"more": TREES},
)


@pytest.mark.slow
@given(header=st.dictionaries(st.sampled_from(NAMES), ENTRIES | TREES, max_size=3) | TREES, body=st.binary(max_size=40))
def test_random_safetensors_headers_are_read_or_rejected(tmp_path_factory, header, body):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + body)
    read_or_reject(path)


OPCODES = st.lists(st.sampled_from([bytes([i]) for i in range(256)] + HOSTILE * 4) | st.binary(max_size=4), max_size=30)


@given(opcodes=OPCODES, names=st.lists(st.sampled_from(sorted(TENSORS | ALLOWED)), max_size=4))
def test_random_pickle_opcodes_are_read_or_rejected(opcodes, names):
    for name in names:
        module, _, attribute = name.rpartition(".")
        opcodes.insert(len(opcodes) // 2, f"c{module}\n{attribute}\n".encode())
    for allowed in (TENSORS, ALLOWED):
        with nothing_but_reading(), suppress(CheckpointError):
            list(views(pickles.load(b"".join(opcodes) + b".", allowed, "x", storage), "x"))
