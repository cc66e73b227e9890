"""Checkpoints of known origin, trained by this library, are recognised, as a whole and by role if mixed."""

import json
import mmap
import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import halfstep
from families import for_each
from halfstep.bits.scan import scan
from halfstep.bits.values import InMemory
from halfstep.errors import QuantizationError
from halfstep.inspection.inspector import read
from halfstep.inspection.report import Known


ROOT = Path(__file__).parents[2]
EXPECTED = {
    "fp32": {"float32 full"},
    "fp16": {"float16 full"},
    "bf16": {"bfloat16 full"},
    "bf16_with_its_master": {"bfloat16 full"},
    "bf16_without_a_master_saved_as_fp32": {"float32 bf16"},
    "fp16_saved_as_fp32": {"float32 fp16"},
    "bf16_saved_as_fp16": {"float16 bf16"},
    "fp32_cast_to_bf16_cast_to_fp16": {"float16 bf16"},
    "norms_fp32_rest_bf16": {"float32 full", "bfloat16 full"},
    "norms_fp32_rest_bf16_saved_as_fp32": {"float32 full", "float32 bf16"},
    "fp8_times_scales_saved_as_bf16": {"bfloat16 scaled float8_e4m3fn"},
    "fp8_in_128x128_blocks_saved_as_bf16": {"bfloat16 scaled float8_e4m3fn 128x128"},
    "fp8lm_o2": {"float32 full", "float32 scaled fp16"},
}
FINER = {  # than --quick finds
    "fp8_times_scales_saved_as_bf16", "fp8_in_128x128_blocks_saved_as_bf16", "fp8lm_o2", "norms_fp32_rest_bf16",
}  # fmt: skip
SAID = {
    "fp32": "full mantissas: from no narrower type that was looked for (float32 training, a master copy, a merge or an",
    "bf16_with_its_master": "master copies: stored float32, full mantissas",
    "bf16_without_a_master_saved_as_fp32": "saved from bf16 weights, without a master copy",
    "bf16_saved_as_fp16": "fp16 subnormals, every value exactly bf16: cast from bf16",
    "norms_fp32_rest_bf16": "mixed by role. norm: stored float32",
    "fp8lm_o2": "every value exactly fp16 times a power of two: weights kept in scaled fp16 (FP8-LM)",
    "fp8_in_128x128_blocks_saved_as_bf16": "exactly float8_e4m3fn times a scale for each 128x128 block: quantised to",
}


@pytest.fixture(scope="module")
def origins(tmp_path_factory):
    """Paths of checkpoints, by the name of their origin."""
    paths = runpy.run_path(str(ROOT / "examples" / "known_origins.py"))["main"](tmp_path_factory.mktemp("origins"), 8)
    return {path.stem: path for path in paths}


@pytest.mark.quick(
    "bf16_with_its_master",
    "norms_fp32_rest_bf16_saved_as_fp32",
    "fp8_times_scales_saved_as_bf16",
    "fp8_in_128x128_blocks_saved_as_bf16",
    "fp8lm_o2",
)
@pytest.mark.parametrize("name", EXPECTED)
def test_origin_is_recognised(origins, name):
    report = halfstep.inspect(origins[name])
    assert set(report.verdict.kinds) == EXPECTED[name]
    assert report.verdict.confidence == "certain"
    assert SAID.get(name, "") in report.verdict.text


def test_every_origin_is_expected(origins):
    assert set(origins) == set(EXPECTED)


@pytest.mark.parametrize("name", ["norms_fp32_rest_bf16", "norms_fp32_rest_bf16_saved_as_fp32"])
def test_mixed_origins_are_separated_by_role(origins, name):
    kinds = {role.role: set(role.verdict.kinds) for role in halfstep.inspect(origins[name]).roles}
    other = EXPECTED[name] - {"float32 full"}
    assert kinds == {"norm": {"float32 full"}} | dict.fromkeys(("head", "embedding", "attention", "mlp"), other)


@pytest.mark.quick("fp32", "fp32_cast_to_bf16_cast_to_fp16")
@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - FINER))
def test_quick_origins_of_weights_equal_full_ones(origins, name):
    report, full = halfstep.inspect(origins[name], quick=True), halfstep.inspect(origins[name])
    found = {t.name: t.origin.key for t in report.tensors if t.shape and len(t.shape) == 2}
    assert found == {t.name: t.origin.key for t in full.tensors if t.name in found}
    assert all(tensor.statistics is None for tensor in report.tensors)


def test_optimizer_states_have_roles(origins):
    roles = {role.role: role for role in halfstep.inspect(origins["bf16_with_its_master"]).roles}
    assert set(roles["master"].verdict.kinds) == set(roles["moments"].verdict.kinds) == {"float32 full"}
    assert roles["other"].verdict.confidence == "none"  # step counts


@for_each("optimizer", ["AdamW", "Adagrad", "NAdam", "ASGD"])
def test_optimizer_file_is_judged_by_its_moments(optimizer, tmp_path):
    """Step counts are tensors, too, but no evidence."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    made = getattr(torch.optim, optimizer)(model.parameters())
    for _ in range(3):
        model(torch.randn(16, 64)).square().sum().backward()
        made.step()
    torch.save(made.state_dict(), tmp_path / "optimizer.pt")
    found = halfstep.inspect(tmp_path / "optimizer.pt").verdict
    assert (found.confidence, found.kinds) == ("certain", ("float32 full",))


@for_each("dtype, most", [(torch.float32, (230, 190)), (torch.bfloat16, (280, 190)), (torch.float16, (240, 190))])
def test_small_tensors_take_no_map_and_few_calls(dtype, most, tmp_path, monkeypatch):
    """A mixture of experts has 100,000 tensors, so the cost per tensor outweighs the cost per value."""
    torch.manual_seed(0)
    count = Counter()

    def profile(frame, event, argument):
        count[shape] += event in ("call", "c_call")

    monkeypatch.setattr(mmap, "mmap", None)
    for shape in ((16, 64), (64,)):
        path = tmp_path / f"{len(shape)}.safetensors"
        save_file({f"{i}": torch.randn(shape).to(dtype) for i in range(50)}, path)
        tensors = halfstep.inspection.open_checkpoint(path).tensors
        list(read(tensors))  # warms the caches of formats
        sys.setprofile(profile)
        list(read(tensors))
        sys.setprofile(None)
    assert count[16, 64] < 50 * most[0], count
    assert count[64,] < 50 * most[1], count


@for_each("shape", [(16, 16), (64, 512), (8, 33), (1, 1), (65, 40), (20, 600)])
def test_small_and_stacked_matrices_have_equal_samples(shape):
    """A stack of one matrix is copied row by row."""
    x = torch.randn(shape)
    small, stacked = scan(InMemory(x)).places, scan(InMemory(x[None])).places
    assert np.array_equal(small.lines, stacked.lines)
    assert all(map(np.array_equal, small.bands, stacked.bands))
    assert len(small.bands) == len(stacked.bands)


def saved(folder, tensors, config=None):
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_config_dtype_that_the_bits_contradict_is_reported(tmp_path):
    weights = {"h.0.mlp.weight": torch.randn(64, 64).bfloat16().half()}
    report = halfstep.inspect(saved(tmp_path, weights, {"torch_dtype": "float16", "model_type": "gpt2"}))
    assert report.config_dtype == "float16"
    assert report.contradictions == ("config.json says float16; the bits say bf16 origin",)


def test_config_dtype_that_differs_from_the_file_is_reported(tmp_path):
    report = halfstep.inspect(saved(tmp_path, {"h.0.mlp.weight": torch.randn(64, 64)}, {"dtype": "bfloat16"}))
    assert report.contradictions == ("config.json says bfloat16; 100% of the values are stored as float32",)


@pytest.mark.parametrize(("computes", "contradicted"), [(("fp16",), True), (("bf16",), False), ((), False)])
def test_known_precision_that_the_bits_contradict_is_reported(tmp_path, computes, contradicted):
    folder = saved(tmp_path, {"h.0.mlp.weight": torch.randn(64, 64).bfloat16().float()})
    found = halfstep.inspect(folder, known=Known("a paper", computes)).contradictions
    assert found == (("a paper says trained in fp16; the bits say bf16 origin",) if contradicted else ())


def test_tied_and_equal_tensors_are_reported(tmp_path):
    weight = torch.randn(64, 64)
    tensors = {"a": weight, "b": weight.clone(), "c": torch.ones(64), "d": torch.ones(64), "e": weight.t().contiguous()}
    found = {t.name: t for t in halfstep.inspect(saved(tmp_path, tensors)).tensors}
    assert found["b"].duplicate_of == "a" or found["a"].duplicate_of == "b"
    assert [found[name].duplicate_of for name in "cde"] == [None] * 3
    torch.save({"a": weight, "b": weight}, tmp_path / "tied.pt")
    first, second = halfstep.inspect(tmp_path / "tied.pt").tensors
    assert (first.tied_to, second.tied_to) == (None, first.name)
    assert halfstep.inspect(tmp_path / "tied.pt").numel == weight.numel()


def test_requested_casts_are_tried(tmp_path):
    folder = saved(tmp_path, {"w": torch.randn(32, 64), "bias": torch.randn(64)})
    assert [one.total.format for one in halfstep.inspect(folder, casts=["nf4", "fp16"]).casts] == ["nf4", "fp16"]
    assert [name for name, _ in halfstep.inspect(folder, casts=["nf4"]).casts[0].worst] == ["w"]
    assert halfstep.inspect(folder).casts == ()
    with pytest.raises(QuantizationError, match=r"unknown format to try 'mxfp9'; nearest: mxfp8"):
        halfstep.inspect(folder, casts=["mxfp9"])


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        ({"W_q": torch.uint8}, {"scale": torch.float16, "zero": torch.float16}),  # HQQ
        ({"weight._data": torch.int8}, {"weight._scale": torch.float32}),  # quanto
        ({"packed": torch.int32}, {"weight.lut": torch.float32}),
    ],
)
def test_codes_of_an_unknown_layout_leave_no_verdict(codes, scales, tmp_path):
    tensors = {f"h.0.mlp.{name}": torch.randint(0, 100, (256, 256)).to(dtype) for name, dtype in codes.items()}
    tensors |= {f"h.0.mlp.{name}": torch.rand(256, 4).to(dtype) for name, dtype in scales.items()}
    found = halfstep.inspect(saved(tmp_path, tensors | {"h.0.norm.weight": torch.rand(256).bfloat16()}))
    assert found.verdict.confidence == "none"
    (dtype,) = {str(dtype)[6:] for dtype in codes.values()}
    assert f"of the bytes are integers ({dtype}) of no known layout: codes of a quantiser" in found.verdict.text
    assert found.verdict.kinds[0] == f"{dtype} codes"
    assert "The rest: stored" in found.verdict.text


def test_few_unknown_codes_do_not_lower_confidence(tmp_path):
    tensors = {"h.0.mlp.weight": torch.randn(256, 256), "h.1.mlp.W_q": torch.ones(256, 256, dtype=torch.uint8)}
    found = halfstep.inspect(saved(tmp_path, tensors))
    assert found.verdict.confidence == "certain"
    assert found.verdict.text.startswith("20% of the bytes are integers (uint8) of no known layout")
    assert "The rest: stored float32, full mantissas" in found.verdict.text
    tensors["h.0.attn.bias"] = tensors.pop("h.1.mlp.W_q")[:8].bool()  # masks are no codes
    (tmp_path / "b").mkdir()
    assert halfstep.inspect(saved(tmp_path / "b", tensors)).verdict.kinds == ("float32 full",)
