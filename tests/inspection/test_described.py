"""Quantized layers described in the file: every format that halfstep writes is named, and broken layers are found."""

import json

import pytest
import torch
from kinds import GGUF_TYPES, gguf
from safetensors.torch import load_file, save_file
from torch import nn

import halfstep
from halfstep import formats
from halfstep.inspection import open_checkpoint
from halfstep.inspection.write import TARGETS, Scaled, write
from halfstep.quant import Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.description import MALFORMED, from_label, label
from halfstep.quant.scaling import get_scaling
from halfstep.recipe import get_recipe, list_recipes


NAME = "model.layers.0.mlp.up_proj.weight"
ROWS, COLUMNS = 256, 384
WRITTEN = {  # bits including scales of 8 or 32 bits
    "e4m3fn_tensor": ("float8_e4m3fn codes with one float32 scale", 8 + 32 / (ROWS * COLUMNS)),
    "e4m3fn_row": ("float8_e4m3fn codes with a float32 scale for each row", 8 + 32 / COLUMNS),
    "e4m3fn_128x128": ("float8_e4m3fn codes with a float32 scale for each 128x128 block", 8 + 32 / 128**2),
    "mxfp8": ("float8_e4m3fn codes with a float8_e8m0fnu scale for each 1x32 block", 8 + 8 / 32),
    "int8": ("int8 codes with a float32 scale for each row", 8 + 32 / COLUMNS),
    "mxfp4": ("float4_e2m1fn codes with a float8_e8m0fnu scale for each 1x32 block", 4 + 8 / 32),
    "nvfp4": (
        "float4_e2m1fn codes with a float8_e4m3fn scale for each 1x16 block and a float32 scale of the tensor",
        4 + 8 / 16 + 32 / (ROWS * COLUMNS),
    ),
    "nf4": ("nf4 codes with a float32 scale for each 1x64 block", 4 + 32 / 64),
}


def cast(folder, target, tensors):
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder / "model.safetensors")
    write(checkpoint, halfstep.inspect(checkpoint).tensors, target, folder / "cast.safetensors")
    return folder / "cast.safetensors"


@pytest.mark.quick("e4m3fn_tensor-False", "nvfp4-False", "nvfp4-True")
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("target", WRITTEN)
def test_layers_written_by_inspect_to_are_named(tmp_path, target, quick):
    text, bits = WRITTEN[target]
    path = cast(tmp_path, target, {NAME: torch.randn(ROWS, COLUMNS), "model.norm.weight": torch.ones(COLUMNS)})
    report = halfstep.inspect(path, quick=quick)
    (found,) = report.schemes
    assert (found.scheme, found.layers, found.values, found.text) == ("halfstep", 1, ROWS * COLUMNS, text)
    assert found.bits == pytest.approx(bits, abs=1e-9)
    assert (report.findings, report.contradictions) == ((), ())
    assert f"halfstep: {text}" in report.verdict.text
    roles = {tensor.name: tensor.role for tensor in report.tensors}
    assert {name for name, role in roles.items() if role == "mlp"} == {f"{NAME}.codes"}
    assert {name for name in roles if "scale" in name} == {name for name, role in roles.items() if role == "scales"}


def test_all_written_formats_are_tested():
    assert set(WRITTEN) == {name for name, how in TARGETS.items() if isinstance(how, Scaled)}


OWN = Quantizer(formats.Float("of my own", 4, 3, 7, "finite", source="a test"))


@pytest.mark.quick(
    "float 8 23 127 ieee, no tile, no scale-shape0",
    "float 8 10 127 ieee, no tile, no scale-shape0",
    "posit 16 1, no tile, no scale-shape0",
    "float 3 2 3 finite, no tile, no scale-shape0",
    "integer 0 15 0, no tile, no scale-shape0",
    "float 4 3 7 fn, 1x32, floor-shape0",
)
@pytest.mark.parametrize("shape", [(6, 70), *(pytest.param(s, marks=pytest.mark.slow) for s in ((3, 5, 7), (64,), ()))])
@pytest.mark.parametrize(
    "quantizer", [*map(get_quantizer, (*formats.names(), *formats.block_names())), OWN], ids=lambda q: label(q)[:60]
)
def test_layers_written_by_save_quantized_are_named(tmp_path, quantizer, shape):
    tensors = {"w": halfstep.quantize(torch.randn(shape).abs() + 0.1, quantizer)}
    halfstep.save_quantized(tensors, tmp_path / "q.safetensors")
    report = halfstep.inspect(tmp_path / "q.safetensors")
    (found,) = report.schemes
    assert found.values == max(torch.Size(shape).numel(), 1)
    assert found.nbytes == tensors["w"].nbytes
    assert found.text.startswith(f"{quantizer.format.name} codes")
    assert ("scale" in found.text) == (quantizer.scales is not None)
    assert report.findings == ()
    json.dumps(report.to_dict(), allow_nan=False)


ABLE = [
    n for n in list_recipes() if any(r.linear.output.rhs and r.linear.output.rhs.scales for r in get_recipe(n).rules)
]


@pytest.mark.quick("nf4-double", "fp4-wang", "coat")
@pytest.mark.parametrize("name", ABLE)
def test_layers_of_quantize_model_are_named(tmp_path, name):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    smooth = {"smooth": {}} if get_recipe(name).smooth_glu == "channel" else {}
    if get_recipe(name).unit_scaled:
        halfstep.unit_scale(model, torch.randn(8, 64))
    halfstep.quantize_model(model, name, **smooth)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    quantizer = get_recipe(name).rules[-1].linear.output.rhs  # the feed-forward layers' quantizer
    parts = [t for key, t in model.state_dict().items() if "weight_" in key and not key.endswith("weight_format")]
    for file in ("model.safetensors", "model.pt"):
        report = halfstep.inspect(tmp_path / file)
        assert report.findings == ()
        assert sum(one.layers for one in report.schemes) == 2
        assert sum(one.nbytes for one in report.schemes) == sum(t.nbytes for t in parts)
        assert all(one.text.startswith(f"{quantizer.format.name} codes with") for one in report.schemes)
        assert {t.role for t in report.tensors if t.name.endswith(("_format", "_scale"))} == {"scales"}


def test_stacked_experts_are_one_layer(tmp_path):
    quantizer = get_quantizer("mxfp4")
    experts = [quantizer.quantize(torch.randn(64, 96)) for _ in range(3)]
    parts = {
        f"mlp.experts.up_{part}": torch.stack([one.tensors[part] for one in experts]) for part in ("codes", "scale")
    }
    parts["mlp.experts.up_format"] = torch.tensor(list(label(quantizer).encode()), dtype=torch.uint8)
    save_file(parts, tmp_path / "model.safetensors")
    (found,) = halfstep.inspect(tmp_path / "model.safetensors").schemes
    assert (found.values, found.bits, found.text) == (3 * 64 * 96, 4.25, WRITTEN["mxfp4"][0])


@pytest.mark.parametrize("name", [*formats.names(), *formats.block_names()])
def test_label_roundtrips_format_and_scales(name):
    quantizer = get_quantizer(name)
    found = from_label(label(quantizer))
    assert (found.format.key, found.scales) == (quantizer.format.key, quantizer.scales)
    tall = Quantizer(quantizer.format, scales=Scales(Tile(0, 1), get_scaling("floor")))
    assert from_label(label(tall)).scales == tall.scales


def test_label_roundtrips_options():
    quantizer = Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 0), get_scaling("rceil", margin=3)))
    assert label(quantizer) == "float 4 3 7 fn, 1xall, rceil margin=3"
    assert from_label(label(quantizer)).scales == quantizer.scales


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a, b",
        "float 4 3 7 fn, 1x32, of tomorrow",
        "x, 1x32, rceil",
        "int8, 1y2, rceil",
        "float 4 3 7 fn, 1x32, rceil margin=x",
    ],
)
def test_malformed_label_raises(text):
    with pytest.raises(MALFORMED):
        from_label(text)


def edited(folder, change):
    """An inspected mxfp4 file after `change` to its tensors and metadata."""
    path = cast(folder, "mxfp4", {NAME: torch.randn(ROWS, COLUMNS)})
    tensors = load_file(path)
    data = {"halfstep.quantized": json.loads(open_checkpoint(path).metadata["halfstep.quantized"])}
    change(tensors, data["halfstep.quantized"][NAME])
    save_file(tensors, path, {key: json.dumps(value) for key, value in data.items()})
    return halfstep.inspect(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, data: tensors.pop(f"{NAME}.scale"), f"{NAME}.codes (halfstep): no scale beside it"),
        (lambda tensors, data: tensors.pop(f"{NAME}.codes"), f"{NAME}.codes (halfstep): no codes beside it"),
        (
            lambda tensors, data: tensors.update({f"{NAME}.scale": torch.zeros(4, 4)}),
            f"{NAME}.codes (halfstep): scale of shape 4x4 in float32; expected 256x12 in uint8",
        ),
        (lambda tensors, data: data.pop("tile"), f"{NAME} (halfstep): what the file says of it cannot be read: 'tile'"),
        (lambda tensors, data: data.update(format="float4_e9"), "unknown format 'float4_e9'"),
        (lambda tensors, data: data.update(shape=[-1, 2]), "expected integers, at most 2^48 elements"),
        (lambda tensors, data: data.update(format={"kind": "Float", "name": 3}), "cannot be read"),
    ],
)  # fmt: skip
def test_broken_layer_is_found(tmp_path, change, message):
    report = edited(tmp_path, change)
    assert len(report.findings) == 1
    assert message in report.findings[0]
    assert report.schemes == ()


def test_invalid_metadata_json_is_found(tmp_path):
    save_file(
        {"w.codes": torch.zeros(4, 4, dtype=torch.uint8)}, tmp_path / "q.safetensors", {"halfstep.quantized": "{"}
    )
    (found,) = halfstep.inspect(tmp_path / "q.safetensors").findings
    assert found.startswith("the metadata 'halfstep.quantized' is not JSON")


def test_unknown_label_is_found(tmp_path):
    text = torch.tensor(list(b"float 9, 1x32, rceil\x1b"), dtype=torch.uint8)
    save_file({"w_codes": torch.zeros(4, 4, dtype=torch.uint8), "w_format": text}, tmp_path / "q.safetensors")
    (found,) = halfstep.inspect(tmp_path / "q.safetensors").findings
    assert found == "w_codes (halfstep): its format 'float 9, 1x32, rceil\\x1b' is not known here"


def test_gguf_blocks_are_described_without_origin(tmp_path):
    report = halfstep.inspect(gguf(tmp_path))
    blocks = {name: (values, nbytes) for name, (_, values, nbytes) in GGUF_TYPES.items() if values > 1}
    found = {one.scheme: one for one in report.schemes}
    assert set(found) == {f"GGUF {name}" for name in blocks}
    for name, (values, nbytes) in blocks.items():
        one = found[f"GGUF {name}"]
        assert (one.text, one.bits) == (f"{name} codes and scales in blocks of {values}", 8 * nbytes / values)
    tensors = {tensor.name: tensor for tensor in report.tensors}
    assert all(tensors[name].origin is None for name in blocks)
    assert all(tensors[name].statistics is not None for name in blocks)
    assert "partly" not in report.verdict.text
    assert "GGUF q2_k: q2_k codes and scales in blocks of 256" in report.verdict.text
