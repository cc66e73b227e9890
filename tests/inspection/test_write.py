"""A written cast reads back as the cast of every tensor, and its file appears whole or not at all."""

import json

import numpy as np
import pytest
import torch
from kinds import gguf, stored_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import halfstep
from families import for_each
from halfstep.errors import CheckpointError, QuantizationError
from halfstep.inspection import open_checkpoint
from halfstep.inspection.write import TARGETS, Plain, write


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn(700, 512, generator=generator) * 20000,
        "half": torch.randn(40, 96, generator=generator).half(),
        "odd": torch.randn(3, 5, 7, generator=generator).bfloat16(),
        "double": torch.randn(4, 6, generator=generator, dtype=torch.float64),
        "bias": torch.randn(64, generator=generator),
        "positions": torch.arange(4),
        "mask": torch.tensor([True, False]),
    }


@pytest.fixture
def checkpoint(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors", {"made_by": "a test"})
    return open_checkpoint(tmp_path / "model.safetensors")


def cast(checkpoint, target, path):
    return write(checkpoint, halfstep.inspect(checkpoint).tensors, target, path)


@pytest.mark.parametrize(("target", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_quantized_gguf_types_are_decoded(tmp_path, target, dtype):
    checkpoint = open_checkpoint(gguf(tmp_path))
    assert cast(checkpoint, target, tmp_path / "out.safetensors").copied == 0
    found = load_file(tmp_path / "out.safetensors")
    decoded = [tensor for tensor in checkpoint.tensors if tensor.dtype.startswith(("q", "mxfp4"))]
    assert len(decoded) == 12
    for tensor in decoded:
        x = torch.from_numpy(np.frombuffer(stored_bits(tensor), np.float32).reshape(tensor.shape).copy())
        torch.testing.assert_close(found[tensor.name], x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_quantized_gguf_types_cannot_be_cast_to_other_codes(tmp_path):
    with pytest.raises(CheckpointError, match=r"'q4_0' is of type q4_0, .*; cast to fp32, fp16 or bf16, which decodes"):
        cast(open_checkpoint(gguf(tmp_path)), "mxfp4", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.quick("fp16", "float8_e5m2")
@pytest.mark.parametrize("target", [name for name, how in TARGETS.items() if isinstance(how, Plain)])
def test_plain_casts_equal_torch(checkpoint, tmp_path, target):
    done = cast(checkpoint, target, tmp_path / "out.safetensors")
    found, dtype = load_file(tmp_path / "out.safetensors"), getattr(torch, TARGETS[target].dtype)
    for name, x in tensors().items():
        if not x.is_floating_point():
            assert torch.equal(found[name], x)
            continue
        limit = torch.finfo(dtype).max
        y = (x.clamp(-limit, limit) if dtype.itemsize == 1 else x).to(dtype)
        assert found[name].dtype == dtype
        assert torch.equal(found[name].view(torch.uint8), y.view(torch.uint8))
    floats = [x.double() for x in tensors().values() if x.is_floating_point()]
    back = [halfstep.round_to(x, dtype, overflow="ieee") for x in floats]
    assert done.overflowing == sum(int((~y.isfinite()).sum()) for y in back)
    assert done.zeroed == sum(int(((y == 0) & (x != 0)).sum()) for x, y in zip(floats, back, strict=True))
    assert (done.overflowing > 0) == (target in ("fp16", "float8_e4m3fn", "float8_e5m2"))
    assert (done.cast, done.copied) == (5, 2)
    assert done.nbytes == (tmp_path / "out.safetensors").stat().st_size


@pytest.mark.quick("mxfp8", "int8")
@pytest.mark.parametrize("target", [name for name, how in TARGETS.items() if not isinstance(how, Plain)])
def test_scaled_casts_load_as_quantized_tensors(checkpoint, tmp_path, target):
    cast(checkpoint, target, tmp_path / "out.safetensors")
    loaded = halfstep.load_quantized(tmp_path / "out.safetensors")
    assert set(loaded) == {"wide", "half", "odd"}
    for name, quantized in loaded.items():
        expected = TARGETS[target].quantizer.quantize(tensors()[name])
        assert set(quantized.tensors) == set(expected.tensors)
        for part, tensor in expected.tensors.items():
            assert torch.equal(quantized.tensors[part], tensor), part
        assert quantized.dtype == tensors()[name].dtype
    found = load_file(tmp_path / "out.safetensors")
    for name in ("double", "bias", "positions", "mask"):
        assert torch.equal(found[name], tensors()[name])


def test_metadata_is_kept_with_the_format_for_transformers(checkpoint, tmp_path):
    cast(checkpoint, "bf16", tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"made_by": "a test", "format": "pt"}


def test_existing_file_is_not_overwritten(checkpoint, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_text("precious")
    with pytest.raises(CheckpointError, match=r"out.safetensors' exists; name a file that does not"):
        cast(checkpoint, "bf16", out)
    assert out.read_text() == "precious"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_write_leaves_no_file(checkpoint, tmp_path, error):
    def stop(count):
        raise error

    before = set(tmp_path.iterdir())
    reports = halfstep.inspect(checkpoint).tensors
    with pytest.raises(error):
        write(checkpoint, reports, "bf16", tmp_path / "out.safetensors", stop)
    assert set(tmp_path.iterdir()) == before


def test_missing_folder_raises(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be written: its folder .* is not there, or read-only"):
        cast(checkpoint, "bf16", tmp_path / "no" / "out.safetensors")


def test_unknown_format_raises(checkpoint, tmp_path):
    with pytest.raises(QuantizationError, match=r"unknown format to write 'bf61'; nearest: bf16"):
        cast(checkpoint, "bf61", tmp_path / "out.safetensors")


@for_each("target", ["bf16", "mxfp8"])
def test_complex_tensors_are_copied_unchanged(target, tmp_path):
    held = {name: torch.view_as_complex(torch.randn(3, 40, 2).to(dtype)) for name, dtype in
            (("turns", torch.float32), ("twice", torch.float64))}  # fmt: skip
    torch.save({"w": torch.randn(32, 32), **held, "t": held["turns"].T}, tmp_path / "model.pt")
    out = tmp_path / f"{target}.safetensors"
    written = cast(open_checkpoint(tmp_path / "model.pt"), target, out)
    assert (written.cast, written.copied) == (1, 3)
    found = load_file(out)
    assert torch.equal(found["turns"], held["turns"])
    assert torch.equal(found["t"], held["turns"].T)
    assert torch.equal(torch.view_as_complex(found["twice"]), held["twice"])
    assert [text.partition(" ")[0] for text in written.remarks] == ["complex64", "complex128"]
    assert "'turns' and 1 more" in written.remarks[0]


def test_dtype_unknown_to_safetensors_raises(tmp_path):
    torch.save({"turns": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"'turns' is of type float4_e2m1fn_x2, which cannot be copied"):
        cast(open_checkpoint(tmp_path / "model.pt"), "bf16", tmp_path / "out.safetensors")


@pytest.mark.slow
def test_transformers_loads_the_written_cast(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    (tmp_path / "cast").mkdir()
    (tmp_path / "cast" / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "model" / "config.json").read_text()) | {"dtype": "bfloat16"})
    )
    cast(checkpoint, "bf16", tmp_path / "cast" / "model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cast", dtype="auto")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16()), name


def test_scales_of_codes_are_not_cast(tmp_path):
    tensors = {
        "h.0.mlp.weight": torch.randn(256, 256).to(torch.float8_e4m3fn),
        "h.0.mlp.weight_scale_inv": torch.rand(2, 2),
        "h.0.attn.weight": torch.randn(32, 32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    report = halfstep.inspect(checkpoint, casts=["bf16"])
    assert [name for name, _ in report.casts[0].worst] == ["h.0.attn.weight"]
    write(checkpoint, report.tensors, "bf16", tmp_path / "new.safetensors")
    written = load_file(tmp_path / "new.safetensors")
    assert {name: x.dtype for name, x in written.items()} == {
        "h.0.mlp.weight": torch.float8_e4m3fn,
        "h.0.mlp.weight_scale_inv": torch.float32,
        "h.0.attn.weight": torch.bfloat16,
    }
    assert torch.equal(written["h.0.mlp.weight_scale_inv"], tensors["h.0.mlp.weight_scale_inv"])


@pytest.mark.slow
def test_matrix_larger_than_one_file_map_is_cast(tmp_path):
    """Its rows do not divide a map's 16 MiB, so that a map ends within a row."""
    weight = torch.randn(1700, 3000)
    save_file({"w": weight}, tmp_path / "in.safetensors")
    halfstep.inspect(tmp_path / "in.safetensors", casts=["mxfp8", "bf16"])
    cast(open_checkpoint(tmp_path / "in.safetensors"), "mxfp8", tmp_path / "out.safetensors")
    found = halfstep.load_quantized(tmp_path / "out.safetensors")["w"]
    expected = TARGETS["mxfp8"].quantizer.quantize(weight)
    assert all(torch.equal(found.tensors[part], tensor) for part, tensor in expected.tensors.items())
