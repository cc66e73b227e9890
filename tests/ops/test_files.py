"""Quantized tensors in files: they round-trip exactly, and invalid files are refused."""

import itertools
import json
import struct

import pytest
import torch
from safetensors.torch import save_file

import halfstep
from families import in_turn, slow_unless
from halfstep import formats
from halfstep.errors import CheckpointError
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from tiny import assert_same


THIRDS = formats.Codebook("thirds", (-1.0, -1 / 3, 1 / 3, 1.0), source="made up")
OWN = [
    Quantizer(formats.ieee("e4m2", 4, 2, "made up")),
    Quantizer(THIRDS, scales=Scales(Tile(1, 8), get_scaling("absmax"))),
    Quantizer(formats.Integer("int3", -3, 3, source="made up"), scales=Scales(Tile(2, 4), get_scaling("floor"))),
    Quantizer(formats.posit(7, 1), "toward_zero"),
    Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 8), get_scaling("rceil", margin=3))),
]
NAMED = ["e4m3fn", "bf16", "fp32", "posit16_1", "fp6_e3m2", *formats.block_names()]


def sample(shape=(6, 70), dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 3


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


QUANTIZERS = [*NAMED, *OWN]
SHAPES = [(6, 70), (2, 3, 33), (5,), (), (0, 4)]


@pytest.mark.parametrize(
    ("quantizer", "shape"),
    slow_unless(
        lambda case: case[1] == SHAPES[0] or case in in_turn(QUANTIZERS, SHAPES), itertools.product(QUANTIZERS, SHAPES)
    ),
    ids=str,
)
def test_a_saved_tensor_loads_exactly(quantizer, shape, path):
    before = halfstep.quantize(sample(shape), quantizer)
    halfstep.save_quantized({"block.weight": before}, path)
    after = halfstep.load_quantized(path)["block.weight"]
    assert after.quantizer == before.quantizer
    assert (after.shape, after.dtype) == (before.shape, before.dtype)
    assert_same(after.tensors, before.tensors)
    assert_same(after.dequantize(), before.dequantize())


def test_a_file_with_several_tensors_and_dtypes_loads(path):
    kept = {str(d): halfstep.quantize(sample(dtype=d), "mxfp4") for d in (torch.float64, torch.bfloat16, torch.float16)}
    halfstep.save_quantized(kept, path)
    for name, quantized in halfstep.load_quantized(path).items():
        assert_same(quantized.dequantize(), kept[name].dequantize())


def rewritten(path, change, **tensors):
    """Write a file with one mxfp4 tensor, then change its description by `change` and its tensors by name."""
    quantized = halfstep.quantize(sample(), "mxfp4")
    halfstep.save_quantized({"w": quantized}, path)
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    metadata = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
    described = json.loads(metadata["halfstep.quantized"])
    described["w"].update(change)
    parts = {f"w.{n}": t for n, t in {**quantized.tensors, **tensors}.items()}
    save_file(parts, str(path), metadata={"halfstep.quantized": json.dumps(described)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "float4_e2m2"}, "unknown format 'float4_e2m2'"),
        ({"format": {"kind": "Sorcery", "name": "x"}}, "format kind 'Sorcery'"),
        ({"format": {"kind": "Float", "name": "x"}}, "edited"),
        ({"format": {"kind": "Codebook", "name": "x", "source": "", "aliases": [], "table": [1, 2]}}, "2 entries"),
        ({"scaling": "flor"}, "unknown scale rule 'flor'; nearest: floor"),
        ({"scaling": {"name": "floor", "margn": 1}}, "unknown option of scale rule floor 'margn'; nearest: margin"),
        ({"scaling": {"name": "floor", "margin": "1"}}, "option margin = '1' .* expected an integer"),
        ({"scaling": {"margin": 1}}, "edited"),
        ({"rounding": "nearst_even"}, "unknown rounding"),
        ({"overflow": "wrap"}, "edited"),
        ({"tile": [1, -32]}, "expected integers"),
        ({"tile": [1.5, 32]}, "expected integers"),
        ({"tile": None}, "expected both, or neither"),
        ({"outliers": -1.0}, "positive threshold"),
        ({"outliers": "six"}, "edited"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' found"),
        ({"shape": [6, 71]}, r"'codes' is \(6, 35\).*\(6, 36\)"),
        ({"shape": [6, -70]}, "integers"),
        ({"shape": [2**40, 2**40]}, "at most 2\\^48"),
        ({"shape": [6.0, 70]}, "integers"),
        ({"shape": 420}, "edited"),
        ({"tensors": ["codes"]}, r"tensors \['codes'\] found"),
        ({"tensors": ["codes", "scale", "zero_point"]}, "lacks w.zero_point"),
    ],
    ids=str,
)
def test_invalid_descriptions_are_refused(path, change, words):
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=words):
        halfstep.load_quantized(path)


def test_options_of_a_scaling_load_from_a_table_or_from_text(path):
    for scaling in ({"name": "floor", "margin": 1}, "floor margin=1"):
        rewritten(path, {"scaling": scaling})
        scales = halfstep.load_quantized(path)["w"].quantizer.scales
        assert scales == Scales(Tile(1, 32), get_scaling("floor", margin=1))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"scale": torch.zeros(6, 2, dtype=torch.uint8)}, r"'scale' is \(6, 2\).*\(6, 3\)"),
        ({"scale": torch.zeros(6, 3)}, "'scale' is .*float32"),
        ({"codes": torch.zeros(6, 35, dtype=torch.int8)}, "'codes' is .*int8"),
    ],
)
def test_tensors_of_the_wrong_shape_or_dtype_are_refused(path, tensors, words):
    rewritten(path, {}, **tensors)
    with pytest.raises(CheckpointError, match=words):
        halfstep.load_quantized(path)


def test_other_files_are_refused(path, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        halfstep.load_quantized(tmp_path / "nothing.safetensors")
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="cannot be read"):
        halfstep.load_quantized(path)
    save_file({"w": torch.zeros(3)}, str(path))
    with pytest.raises(CheckpointError, match="not written by save_quantized"):
        halfstep.load_quantized(path)
    save_file({"w": torch.zeros(3)}, str(path), metadata={"halfstep.quantized": "{not json"})
    with pytest.raises(CheckpointError, match="edited"):
        halfstep.load_quantized(path)
