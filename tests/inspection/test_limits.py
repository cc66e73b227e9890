"""Opening and reading files at the limits takes less than 300 MB, measured in separate processes."""

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch


MEASURE = """
import sys
from pathlib import Path
from threading import Event, Thread
from halfstep.inspection import open_checkpoint
from halfstep.inspection.inspector import readers
from halfstep.errors import CheckpointError

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

readers()
before, peak, done = anonymous(), [0], Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())

watcher = Thread(target=watch)
watcher.start()
try:
    checkpoint = open_checkpoint(sys.argv[1])
    for tensor in checkpoint.tensors[:100]:
        for piece in tensor.chunks():
            pass
    peak[0] = max(peak[0], anonymous())
except CheckpointError as error:
    print(error, file=sys.stderr)
done.set()
watcher.join()
print(peak[0] - before)
"""


def megabytes(path):
    """The peak anonymous memory of opening and reading, beyond that of imports, and the error output."""
    found = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    return float(found.stdout), found.stderr


def safetensors(path, header, body=0):
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + body)
    return path


def mixture(count):
    names = [f"model.layers.{i // 700}.mlp.experts.{i % 700}.gate_proj.weight" for i in range(count)]
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    return names, json.dumps(header).encode()


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="anonymous memory is read from /proc"),
]


def test_header_with_150000_tensors(tmp_path):
    names, header = mixture(150_000)
    safetensors(tmp_path / "a.safetensors", header, 4 * len(names))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    for path in (tmp_path / "a.safetensors", index):
        used, error = megabytes(path)
        assert not error
        assert used < 300


@pytest.mark.parametrize("piece", [b"{}", b"[]", b'"abc"', b"1e9", b'{"":0}'])
def test_headers_of_many_small_objects(piece, tmp_path):
    header = b'{"a":[' + b",".join([piece] * (20_000_000 // len(piece))) + b"]}"
    for data in (header, header[: len(header) // 4].rpartition(b",")[0] + b"]}"):
        used, error = megabytes(safetensors(tmp_path / "a.safetensors", data))
        assert error
        assert used < 300


@pytest.mark.parametrize("piece", [b"}", b"]q\0", b"K\1\x85", b"X\1\0\0\0a"])
def test_pickles_of_many_small_objects(piece, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("a/data.pkl", piece * (40_000_000 // len(piece)))
    used, error = megabytes(tmp_path / "a.pt")
    assert "describes more than" in error
    assert used < 300


def test_large_tensors_are_read_in_pieces(tmp_path):
    x = torch.zeros(1 << 14, 1 << 13)
    torch.save({"plain": x, "turned": x.t()}, tmp_path / "a.pt")
    np.savez_compressed(tmp_path / "a.npz", x.numpy())
    for name in ("a.pt", "a.npz"):
        used, error = megabytes(tmp_path / name)
        assert not error
        assert used < 150


def test_measurement_finds_used_memory(tmp_path):
    """Reading a pickle with 50 MB of text shows in the measurement."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("a/data.pkl", pickle.dumps(["a" * (1 << 20)] * 3 + [str(i) * 100 for i in range(100_000)], 2))
    used, error = megabytes(tmp_path / "a.pt")
    assert not error
    assert used > 40
