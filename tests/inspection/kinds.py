"""A small checkpoint of every kind, written by the library that owns the format (GGUF by hand), and its tensors."""

import json
import struct
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of every dtype common to torch and safetensors, odd shapes, and control characters in a name."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 7, generator=generator)
    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    eights = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
    integers = [
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ]
    found = {str(dtype).removeprefix("torch."): x.to(dtype) for dtype in (*floats, *eights)}
    found |= {str(dtype).removeprefix("torch."): torch.arange(6).to(dtype).reshape(2, 3) for dtype in integers}
    found |= {"bool": x > 0, "empty": x[:0], "scalar": torch.tensor(2.5), "bell\a\x1b[31m": x[0].clone()}
    return found


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's values, row-major."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def stored_bits(tensor, nbytes: int = 64) -> bytes:
    """The bytes of a checkpoint tensor's values, read in pieces."""
    pieces = [piece.copy() for piece in tensor.chunks(nbytes)]
    assert all(piece.ndim == 1 and 0 < piece.nbytes <= nbytes for piece in pieces)
    return b"".join(piece.tobytes() for piece in pieces)


def scan(checkpoint) -> int:
    """Read every value; returns the number of bytes."""
    return sum(piece.nbytes for tensor in checkpoint.tensors for piece in tensor.chunks(1 << 16))


def safetensors(folder: Path) -> Path:
    save_file(tensors(), folder / "a.safetensors", {"format": "pt"})
    return folder / "a.safetensors"


def nested() -> dict[str, object]:
    """The contents of a training checkpoint: weights, tied ones included, and an optimizer's state."""
    model = torch.nn.Sequential(OrderedDict(a=torch.nn.Linear(4, 3), b=torch.nn.Linear(4, 3)))
    model.b.weight = model.a.weight
    optimizer = torch.optim.AdamW(model.parameters())
    model.b(model.a.weight).sum().backward()
    optimizer.step()
    views = {
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "part": torch.arange(20)[3:9],
        "every": torch.arange(20)[::3],
    }
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "views": views, "list": [torch.ones(2), "x"],
        "parameter": torch.nn.Parameter(torch.ones(2)), "step": 7, "dtype": torch.bfloat16, "bytes": b"abc", "set": {1},
        "complex": 1j, "size": torch.Size([2]), "device": torch.device("cpu"), "sparse": torch.eye(2).to_sparse(),
        "tensors": tensors(),
    }  # fmt: skip


def torch_zip(folder: Path) -> Path:
    torch.save(nested(), folder / "a.pt")
    return folder / "a.pt"


def torch_legacy(folder: Path) -> Path:
    """A file as torch.save wrote before 1.6, without 8-bit dtypes."""
    saved = {name: value for name, value in nested().items() if name != "tensors"}
    torch.save(saved, folder / "b.pt", _use_new_zipfile_serialization=False)
    return folder / "b.pt"


def distributed(folder: Path) -> Path:
    state = nested()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about there being one process
        dcp.save({"model": state["model"], "optimizer": state["optimizer"], "n": 3}, checkpoint_id=folder / "dcp")
    return folder / "dcp"


def huggingface(folder: Path) -> Path:
    home = folder / "hf"
    home.mkdir()
    shards = {"model-1.safetensors": {"a": torch.ones(3)}, "model-2.safetensors": {"b": torch.zeros(2, 2)}}
    for name, held in shards.items():
        save_file(held, home / name, {"format": "pt"})
    where = {tensor: name for name, held in shards.items() for tensor in held}
    index = {"metadata": {"total_size": 28}, "weight_map": where}
    (home / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (home / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    return home


def index(folder: Path) -> Path:
    return huggingface(folder) / "model.safetensors.index.json"


def arrays() -> dict[str, np.ndarray]:
    """Arrays of every supported numpy dtype, in both byte orders and both memory orders."""
    x = np.random.default_rng(5).normal(size=(4, 6))
    codes = ["?", "i1", "u1", "<i2", ">i4", "<i8", "<u2", ">u4", "<u8", "<f2", ">f4", "<f8", "<c8", ">c16"]
    with np.errstate(all="ignore"):
        found = {code: np.abs(x).astype(code) for code in codes}
    return found | {"empty": x[:0], "scalar": np.float32(2)}


def npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", turned=np.asfortranarray(arrays()["<f8"]), **arrays())
    return folder / "a.npz"


def npz_deflated(folder: Path) -> Path:
    np.savez_compressed(folder / "b.npz", **arrays())
    return folder / "b.npz"


def npy(folder: Path) -> Path:
    np.save(folder / "a.npy", np.asfortranarray(arrays()[">f4"]))
    return folder / "a.npy"


GGUF_TYPES = {
    "f32": (0, 1, 4), "f16": (1, 1, 2), "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24), "q8_0": (8, 32, 34), "q2_k": (10, 256, 84), "q3_k": (11, 256, 110), "q4_k": (12, 256, 144),
    "q5_k": (13, 256, 176), "q6_k": (14, 256, 210), "bf16": (30, 1, 2), "mxfp4": (39, 32, 17),
    "q8_k": (15, 256, 292), "iq4_nl": (20, 32, 18), "iq4_xs": (23, 256, 136), "tq1_0": (34, 256, 54),
    "tq2_0": (35, 256, 66), "nvfp4": (40, 64, 36), "iq2_xxs": (16, 256, 66), "iq2_xs": (17, 256, 74),
    "iq3_xxs": (18, 256, 98), "iq1_s": (19, 256, 50), "iq3_s": (21, 256, 110), "iq2_s": (22, 256, 82),
    "iq1_m": (29, 256, 56),
}  # fmt: skip
"""(type number, values per block, bytes per block) by type."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_bytes(entries, pairs=(), version: int = 3, alignment: int = 32) -> bytes:
    """A GGUF file of entries (name, shape, type number, bytes) and metadata pairs (key, type number, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(pairs))
    head += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    body = b""
    for name, shape, kind, data in entries:
        body += b"\0" * (-len(body) % alignment)
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", kind, len(body))
        body += data
    return head + b"\0" * (-len(head) % alignment) + body


def gguf(folder: Path) -> Path:
    random = np.random.default_rng(7)
    entries = []
    for name, (number, values, nbytes) in GGUF_TYPES.items():
        entries.append((name, (2, 3 * values), number, random.bytes(6 * nbytes)))
    pairs = [
        ("general.architecture", 8, text("llama")),
        ("scale", 6, struct.pack("<f", 0.5)),
        ("tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("bb") + text("")),
        ("scores", 9, struct.pack("<IQ", 6, 2) + struct.pack("<2f", 1, 2)),
    ]
    (folder / "a.gguf").write_bytes(gguf_bytes(entries, pairs))
    return folder / "a.gguf"


KINDS = {
    build.__name__: build
    for build in (safetensors, torch_zip, torch_legacy, distributed, huggingface, index, npz, npz_deflated, npy, gguf)
}
