"""Quantized layouts are recognised; the files are written by other libraries or by hand from their sources."""

import json

import bitsandbytes
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import halfstep
from halfstep.cli.inspect import text_of
from halfstep.inspection.page import to_html


Parts = dict[str, Tensor]
E4M3 = torch.float8_e4m3fn


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -(2**31)), info.max, shape, dtype=dtype)


def e4m3(*shape: int) -> Tensor:
    return torch.randn(shape).to(E4M3)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) + 0.5).to(dtype)


LAYOUTS: dict[str, tuple[Parts, str, int, str, float]] = {
    "deepseek": (
        {"weight": e4m3(256, 384), "weight_scale_inv": scales(2, 3)},
        "fine-grained FP8", 256 * 384,
        "float8_e4m3fn codes with a float32 scale for each 128x128 block", 8 + 32 / 2**14,
    ),
    "deepseek, ragged": (
        {"weight": e4m3(576, 200), "weight_scale_inv": scales(5, 2)},
        "fine-grained FP8", 576 * 200,
        "float8_e4m3fn codes with a float32 scale for each 128x128 block", 8 + 320 / 115200,
    ),
    "ue8m0 scales": (
        {"weight": e4m3(256, 256), "weight_scale_inv": torch.exp2(torch.randn(2, 2).round())},
        "fine-grained FP8", 2**16,
        "float8_e4m3fn codes with a float32 scale (powers of two) for each 128x128 block", 8 + 32 / 2**14,
    ),
    "experts": (
        {"weight": e4m3(4, 256, 128), "weight_scale_inv": scales(4, 2, 1)},
        "fine-grained FP8", 2**17, "float8_e4m3fn codes with a float32 scale for each 128x128 block", 8 + 32 / 2**14,
    ),
    "fp8, a tensor": (
        {"weight": e4m3(64, 32), "weight_scale": scales(), "input_scale": scales()},
        "FP8", 2048, "float8_e4m3fn codes with one float32 scale", 8 + 64 / 2048,
    ),
    "fp8, a channel": (
        {"weight": e4m3(64, 32), "weight_scale": scales(64, 1, dtype=torch.bfloat16)},
        "FP8", 2048, "float8_e4m3fn codes with a bfloat16 scale for each row", 8.5,
    ),
    "mxfp8": (
        {"weight": e4m3(64, 128), "weight_scale": codes(64, 4)},
        "MXFP8", 64 * 128, "float8_e4m3fn codes with a float8_e8m0fnu scale for each 1x32 block", 8.25,
    ),
    "nvfp4, modelopt": (
        {"weight": codes(64, 64), "weight_scale": scales(64, 8, dtype=E4M3), "weight_scale_2": scales(),
         "input_scale": scales()},
        "NVFP4", 64 * 128,
        "float4_e2m1fn codes with a float8_e4m3fn scale for each 1x16 block and a float32 scale of the tensor",
        4.5 + 64 / 8192,
    ),
    "nvfp4, compressed-tensors": (
        {"weight_packed": codes(64, 64), "weight_scale": scales(64, 8, dtype=E4M3), "weight_global_scale": scales(1)},
        "NVFP4", 64 * 128,
        "float4_e2m1fn codes with a float8_e4m3fn scale for each 1x16 block and a float32 scale of the tensor",
        4.5 + 32 / 8192,
    ),
    "mxfp4, compressed-tensors": (
        {"weight_packed": codes(64, 64), "weight_scale": codes(64, 4)},
        "MXFP4", 64 * 128, "float4_e2m1fn codes with a float8_e8m0fnu scale for each 1x32 block", 4.25,
    ),
    "mxfp4, gpt-oss": (
        {"weight_blocks": codes(2, 64, 4, 16), "weight_scales": codes(2, 64, 4)},
        "MXFP4", 2 * 64 * 128, "float4_e2m1fn codes with a float8_e8m0fnu scale for each 1x32 block", 4.25,
    ),
    "bitsandbytes int8": (
        {"weight": codes(64, 32, dtype=torch.int8), "SCB": scales(64), "weight_format": codes()},
        "bitsandbytes int8", 2048, "int8 codes with a float32 scale for each row", 8 + (64 * 32 + 8) / 2048,
    ),
    "gptq": (
        {"qweight": codes(32, 64, dtype=torch.int32), "qzeros": codes(2, 8, dtype=torch.int32),
         "scales": scales(2, 64, dtype=torch.float16), "g_idx": codes(256, dtype=torch.int32)},
        "GPTQ", 256 * 64, "int4 codes with a float16 scale for each 128x1 block and zero points",
        4 + (512 + 2 * 64 * 16 + 256 * 32) / 2**14,
    ),
    "gptq, 8 bits": (
        {"qweight": codes(64, 64, dtype=torch.int32), "qzeros": codes(2, 16, dtype=torch.int32),
         "scales": scales(2, 64, dtype=torch.float16), "g_idx": codes(256, dtype=torch.int32)},
        "GPTQ", 256 * 64, "int8 codes with a float16 scale for each 128x1 block and zero points",
        8 + (1024 + 2 * 64 * 16 + 256 * 32) / 2**14,
    ),
    "awq": (
        {"qweight": codes(256, 8, dtype=torch.int32), "qzeros": codes(2, 8, dtype=torch.int32),
         "scales": scales(2, 64, dtype=torch.float16)},
        "AWQ", 256 * 64, "int4 codes with a float16 scale for each 128x1 block and zero points",
        4 + (512 + 2 * 64 * 16) / 2**14,
    ),
    "packed int4": (
        {"weight_packed": codes(64, 16, dtype=torch.int32), "weight_scale": scales(64, 4, dtype=torch.bfloat16),
         "weight_shape": torch.tensor([64, 128])},
        "packed int", 64 * 128, "int4 codes with a bfloat16 scale for each 1x32 block", 4.5 + 128 / 8192,
    ),
    "packed int8": (
        {"weight_packed": codes(64, 32, dtype=torch.int32), "weight_scale": scales(64, 1, dtype=torch.bfloat16),
         "weight_shape": torch.tensor([64, 128])},
        "packed int", 64 * 128, "int8 codes with a bfloat16 scale for each row", 8 + (1024 + 128) / 8192,
    ),
    "w8a8": (
        {"weight": codes(64, 32, dtype=torch.int8), "weight_scale": scales(64, 1)},
        "int8", 2048, "int8 codes with a float32 scale for each row", 9.0,
    ),
    "torchao float8": (
        {"_weight_qdata": e4m3(64, 32), "_weight_scale": scales(64, 1)},
        "torchao", 2048, "float8_e4m3fn codes with a float32 scale for each row", 9.0,
    ),
    "torchao int4": (
        {"_weight_qdata": codes(64, 64), "_weight_scale": scales(4, 64, dtype=torch.bfloat16),
         "_weight_zero_point": scales(4, 64, dtype=torch.bfloat16)},
        "torchao int4", 64 * 128, "int4 codes with a bfloat16 scale for each 1x32 block and zero points", 5.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "nested", "bits"), [("nf4", False, 4.5), ("nf4", True, 4.125), ("fp4", True, 4.125)])
def test_bitsandbytes_layers_are_named(tmp_path, kind, nested, bits):
    layer = bitsandbytes.nn.Linear4bit(256, 512, bias=False, quant_type=kind, compress_statistics=nested).to("cpu")
    report = halfstep.inspect(saved(tmp_path, {Q: layer.state_dict()}))
    (found,) = report.schemes
    scale = "uint8" if nested else "float32"
    assert (found.scheme, found.values) == (f"bitsandbytes {kind}", 256 * 512)
    assert found.text == f"{kind} codes with a {scale} scale for each 64 codes"
    assert found.bits == pytest.approx(bits, abs=0.1)
    assert report.findings == ()
    assert {t.role for t in report.tensors if t.name.startswith(f"{Q}.weight.")} == {"scales"}


def saved(folder, layers, config=None):
    tensors = {f"{path}.{name}": t.clone() for path, parts in layers.items() for name, t in parts.items()}
    tensors["model.norm.weight"] = torch.randn(64)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", **(config or {})}))
    return folder


Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"


@pytest.mark.quick("nvfp4, modelopt", "mxfp4, gpt-oss", "bitsandbytes int8", "gptq, 8 bits", "awq", "packed int8")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_named(tmp_path, name):
    parts, scheme, values, text, bits = LAYOUTS[name]
    report = halfstep.inspect(saved(tmp_path, {Q: parts, UP: parts}))
    (found,) = report.schemes
    assert (found.scheme, found.layers, found.values, found.text) == (scheme, 2, 2 * values, text)
    assert found.bits == pytest.approx(bits, abs=1e-9)
    assert report.findings == ()
    assert f"{scheme}: {text}" in report.verdict.text
    assert f"In all 2 {scheme} layers of {bits:.4g} bits a weight" in report.verdict.text
    assert report.contradictions == (f"config.json names no quantisation; the files hold {scheme}: {text}",)
    roles = {tensor.name: tensor.role for tensor in report.tensors}
    weights = {name for name, role in roles.items() if role in ("attention", "mlp")}
    assert weights == {f"{path}.{next(iter(parts))}" for path in (Q, UP)}
    data = report.to_dict()
    assert data["schemes"][0]["text"] == text
    json.dumps(data, allow_nan=False)


DEEPSEEK = {"weight": e4m3(256, 384), "weight_scale_inv": scales(2, 3)}


def test_layer_without_its_scale_is_found(tmp_path):
    report = halfstep.inspect(saved(tmp_path, {Q: DEEPSEEK, UP: {"weight": DEEPSEEK["weight"]}}))
    assert report.findings == (f"{UP}.weight (fine-grained FP8): no weight_scale_inv beside it",)
    assert report.schemes[0].layers == 1


def test_scale_without_its_codes_is_found(tmp_path):
    report = halfstep.inspect(saved(tmp_path, {Q: DEEPSEEK, UP: {"weight_scale_inv": scales(2, 3)}}))
    assert report.findings == (f"{UP}.weight_scale_inv (fine-grained FP8): a scale without codes",)


def test_missing_second_level_scale_is_found(tmp_path):
    nvfp4 = dict(LAYOUTS["nvfp4, modelopt"][0])
    del nvfp4["weight_scale_2"]
    report = halfstep.inspect(saved(tmp_path, {Q: nvfp4}))
    assert report.findings == (f"{Q}.weight (NVFP4): no weight_scale_2 beside it",)
    assert report.schemes[0].layers == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_scales_of_wrong_shape_are_found(tmp_path, name):
    parts = LAYOUTS[name][0]
    scale = next(part for part in parts if "scale" in part or part == "SCB")
    report = halfstep.inspect(saved(tmp_path, {Q: {**parts, scale: scales(3, 11).to(parts[scale].dtype)}}))
    first = next(iter(parts))
    assert [text.partition(" (")[0] for text in report.findings] == [f"{Q}.{first}"]
    assert "scales of shape 3x11 do not fit together" in report.findings[0]
    assert report.schemes == ()


def test_nonfinite_scales_are_found(tmp_path):
    broken = {**DEEPSEEK, "weight_scale_inv": torch.tensor([[1.0, torch.nan, 2.0], [1.0, torch.inf, 3.0]])}
    report = halfstep.inspect(saved(tmp_path, {Q: broken}))
    assert report.findings == (f"{Q}.weight_scale_inv: 2 of 6 scales are not finite",)


FP8 = "fine-grained FP8: float8_e4m3fn codes with a float32 scale for each 128x128 block"
GPTQ = "GPTQ: int4 codes with a float16 scale for each 128x1 block and zero points"
PACKED = "packed int: int4 codes with a bfloat16 scale for each 1x32 block"


@pytest.mark.parametrize(
    ("name", "declared", "contradiction"),
    [
        ("deepseek", {"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        (
            "deepseek",
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            f"says blocks of 64x64; the files hold {FP8}",
        ),
        ("deepseek", {"quant_method": "gptq", "bits": 4}, f"says quantised by gptq; the files hold {FP8}"),
        ("deepseek", {"quant_method": "of tomorrow"}, None),
        ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128}, None),
        (
            "gptq",
            {"quant_method": "gptq", "bits": 8, "group_size": 128},
            f"says 8 bits a weight; the files hold {GPTQ}",
        ),
        ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 64}, f"says groups of 64; the files hold {GPTQ}"),
        (
            "packed int4",
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            f"says 8 bits a weight; the files hold {PACKED}",
        ),
        ("bitsandbytes int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, None),
        ("mxfp4, gpt-oss", {"quant_method": "mxfp4"}, None),
        (
            None,
            {"quant_method": "awq", "bits": 4},
            "says quantised by awq; the files hold no quantised layer of a known layout",
        ),
        (None, {"quant_method": ["odd"], "bits": {}}, None),
        (None, "odd", None),
    ],
)
def test_quantization_config_is_compared_with_the_files(tmp_path, name, declared, contradiction):
    layers = {Q: LAYOUTS[name][0]} if name else {}
    report = halfstep.inspect(saved(tmp_path, layers, {"quantization_config": declared}))
    assert report.contradictions == (() if contradiction is None else (f"config.json {contradiction}",))


def test_fp8_tensors_without_scales_are_no_layers(tmp_path):
    plain = {"weight": e4m3(64, 32), "bias": scales(64)}
    layers = {Q: plain, UP: {"weight": torch.randn(8, 8), "step": codes(3)}}
    report = halfstep.inspect(saved(tmp_path, layers, {"dtype": "float8_e4m3fn"}))
    assert report.schemes == report.findings == report.contradictions == ()


@pytest.mark.quick("awq-shape4", "packed int4-shape2", "packed int4-shape3", "torchao float8-shape3")
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3,), (2, 0, 4)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_degenerate_shapes_do_not_raise(tmp_path, name, shape):
    parts = LAYOUTS[name][0]
    odd = {part: torch.zeros(shape).to(tensor.dtype) for part, tensor in parts.items()}
    report = halfstep.inspect(saved(tmp_path, {Q: odd}))
    json.dumps(report.to_dict(), allow_nan=False)
    assert all(scheme.values > 0 for scheme in report.schemes)


def test_layers_are_shown_in_text_and_page(tmp_path):
    report = halfstep.inspect(saved(tmp_path, {Q: DEEPSEEK, UP: {"weight": DEEPSEEK["weight"]}}))
    text = " ".join(text_of(report, True, None).split())
    assert "1 fine-grained FP8 layer of 8.002 bits a weight, 98,304 weights: float8_e4m3fn codes" in text
    assert f"broken: {UP}.weight (fine-grained FP8): no weight_scale_inv beside it" in text
    page = to_html(report)
    assert "<h2>Quantised layers</h2>" in page
    assert "no weight_scale_inv beside it" in page
