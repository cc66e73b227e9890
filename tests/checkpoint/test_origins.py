"""Checkpoints of known origin, trained by this library, are told apart: in all, and by role where they are mixed."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import halfstep
from halfstep.checkpoint.verdict import Known


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
FINER = {  # than a quick look is
    "fp8_times_scales_saved_as_bf16", "fp8_in_128x128_blocks_saved_as_bf16", "fp8lm_o2", "norms_fp32_rest_bf16",
}  # fmt: skip
SAID = {
    "fp32": "full mantissas: a master copy, or float32 training",
    "bf16_with_its_master": "master copies: stored float32, full mantissas",
    "bf16_without_a_master_saved_as_fp32": "saved from bf16 weights, without a master copy",
    "bf16_saved_as_fp16": "fp16 subnormals, every value exactly bf16: cast from bf16",
    "norms_fp32_rest_bf16": "mixed by role. norm: stored float32",
    "fp8lm_o2": "every value exactly fp16 times a power of two: weights kept in scaled fp16 (FP8-LM)",
    "fp8_in_128x128_blocks_saved_as_bf16": "exactly float8_e4m3fn times a scale for each 128x128 block: quantised to",
}


@pytest.fixture(scope="module")
def origins(tmp_path_factory):
    """Paths by the name that says the origin."""
    paths = runpy.run_path(str(ROOT / "examples" / "known_origins.py"))["main"](tmp_path_factory.mktemp("origins"), 8)
    return {path.stem: path for path in paths}


@pytest.mark.parametrize("name", EXPECTED)
def test_origin_is_told(origins, name):
    report = halfstep.inspect(origins[name])
    assert set(report.verdict.kinds) == EXPECTED[name]
    assert report.verdict.confidence == "certain"
    assert SAID.get(name, "") in report.verdict.text


def test_every_origin_is_expected(origins):
    assert set(origins) == set(EXPECTED)


@pytest.mark.parametrize("name", ["norms_fp32_rest_bf16", "norms_fp32_rest_bf16_saved_as_fp32"])
def test_mixed_by_role(origins, name):
    kinds = {role.role: set(role.verdict.kinds) for role in halfstep.inspect(origins[name]).roles}
    other = EXPECTED[name] - {"float32 full"}
    assert kinds == {"norm": {"float32 full"}} | dict.fromkeys(("head", "embedding", "attention", "mlp"), other)


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - FINER))
def test_a_quick_look_says_the_same_of_the_weights(origins, name):
    report, full = halfstep.inspect(origins[name], quick=True), halfstep.inspect(origins[name])
    found = {t.name: t.origin.key for t in report.tensors if t.shape and len(t.shape) == 2}
    assert found == {t.name: t.origin.key for t in full.tensors if t.name in found}
    assert all(tensor.statistics is None for tensor in report.tensors)


def test_optimizer_state_has_its_roles(origins):
    roles = {role.role: role for role in halfstep.inspect(origins["bf16_with_its_master"]).roles}
    assert set(roles["master"].verdict.kinds) == set(roles["moments"].verdict.kinds) == {"float32 full"}
    assert roles["other"].verdict.confidence == "none"  # step counts


def saved(folder, tensors, config=None):
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_config_that_the_bits_contradict(tmp_path):
    weights = {"h.0.mlp.weight": torch.randn(64, 64).bfloat16().half()}
    report = halfstep.inspect(saved(tmp_path, weights, {"torch_dtype": "float16", "model_type": "gpt2"}))
    assert report.config_dtype == "float16"
    assert report.contradictions == ("config.json says float16; the bits say bf16 origin",)


def test_a_config_that_names_another_type_than_the_file_has(tmp_path):
    report = halfstep.inspect(saved(tmp_path, {"h.0.mlp.weight": torch.randn(64, 64)}, {"dtype": "bfloat16"}))
    assert report.contradictions == ("config.json says bfloat16; 100% of the values are stored as float32",)


@pytest.mark.parametrize(("computes", "said"), [(("fp16",), True), (("bf16",), False), ((), False)])
def test_knowledge_that_the_bits_contradict(tmp_path, computes, said):
    folder = saved(tmp_path, {"h.0.mlp.weight": torch.randn(64, 64).bfloat16().float()})
    found = halfstep.inspect(folder, known=Known("a paper", computes)).contradictions
    assert found == (("a paper says trained in fp16; the bits say bf16 origin",) if said else ())


def key_of(tmp_path, tensor):
    return halfstep.inspect(saved(tmp_path, {"w": tensor})).tensors[0].origin


def test_what_cannot_tell_is_not_counted(tmp_path):
    for constant in (torch.ones(4096), torch.zeros(4096), torch.arange(4096.0), torch.tensor(3.0), torch.empty(0, 4)):
        found = key_of(tmp_path, constant)
        assert (found.key, found.confidence, found.telling) == ("unknown", "none", 0)


FEW = torch.tensor([0.75 + i / 128 for i in range(1, 11)])
"""10 distinct values with at most 8 bits, neither powers of two nor whole."""


def test_equal_values_count_once(tmp_path):
    many, once = (key_of(tmp_path, values) for values in (FEW.repeat(400), FEW))
    assert many.evidence == pytest.approx(once.evidence)
    assert many.distinct == once.distinct == 10


def test_evidence_is_the_chance_of_random_mantissas(tmp_path):
    """Of 8 values, for a format and a scale are chosen so that two fit: (127 / (2^23 - 1))^8."""
    chance = (127 / (2**23 - 1)) ** 8
    assert key_of(tmp_path, FEW).evidence == pytest.approx(-torch.tensor(chance, dtype=torch.float64).log2().item())


ROUNDED = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2", "bf16", "fp16", "tf32")


def five_of(name):
    """The largest values below 2, and their halves and quarters, that are neither powers of two nor whole."""
    eps = 2.0 ** -halfstep.formats.get(name, halfstep.formats.Float).mantissa_bits
    values = [scale * (2 - i * eps) for i in (1, 3, 5) for scale in (1, 0.5, 0.25) if i * eps < 1]
    return torch.tensor(values[:5], dtype=torch.float64)


@pytest.mark.parametrize("repeated", [1, 400])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ROUNDED)
def test_two_different_values_conclude_nothing(tmp_path, format, dtype, repeated):
    """Whatever they were rounded to, and with zeros, powers of two and whole numbers beside them."""
    if halfstep.formats.get(format, halfstep.formats.Float).mantissa_bits + 2 > -math.log2(torch.finfo(dtype).eps):
        pytest.skip("not narrower than the stored type")
    values, beside = five_of(format), torch.tensor([0.0, 1.0, 3.0, 0.25, 6.0], dtype=torch.float64)
    found = [key_of(tmp_path, torch.cat([values[:n].repeat(repeated), beside]).to(dtype)) for n in range(1, 6)]
    assert [one.distinct for one in found] == [min(n, len(values)) for n in range(1, 6)]
    assert [one.confidence for one in found[:2]] == ["none", "none"]
    if len(values) == 5 and dtype in (torch.float32, torch.float64):
        assert found[4].through


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_is_no_cast(tmp_path, dtype):
    tensors = {"b": torch.tensor(1.5, dtype=dtype), "c": torch.zeros(4, 4, dtype=dtype)}
    report = halfstep.inspect(saved(tmp_path, tensors))
    assert report.verdict.confidence == "none"
    assert report.verdict.text.startswith(f"stored {str(dtype)[6:]}, too few different values to tell")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_whole_numbers_tell(tmp_path, dtype):
    assert key_of(tmp_path, (torch.randn(64, 64) * 1e25).to(dtype)).key == "full"
    assert key_of(tmp_path, (torch.randn(64, 64) * 1e25).bfloat16().float()).key == "bf16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counters_and_positions_tell_nothing(tmp_path, dtype):
    counters = torch.tensor([2**24 - 1, 2**24, 12345, 16_777_215, 999_999, 7], dtype=dtype)
    for values in (
        counters,
        torch.arange(2**24 - 4096, 2**24 + 1, dtype=dtype),
        torch.tensor(2.0**24 - 1, dtype=dtype),
    ):
        found = key_of(tmp_path, values)
        assert (found.key, found.telling, found.confidence) == ("unknown", 0, "none")


def test_one_counterexample_refutes(tmp_path):
    values = torch.randn(4096).bfloat16().float()
    assert key_of(tmp_path, values).key == "bf16"
    values[17] = 1 / 3
    assert key_of(tmp_path, values).key == "partly bf16"
    assert key_of(tmp_path, values).share == pytest.approx(4095 / 4096, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["e4m3fn", "e5m2", "e2m1fn"])
def test_values_of_few_bits_under_a_power_of_two(tmp_path, dtype, format):
    values = halfstep.round_to(torch.randn(64, 64) * 2, format).to(dtype) / 4
    found = key_of(tmp_path, values)
    assert found.key == f"scaled {halfstep.formats.get(format).name}"
    assert found.scale.startswith("2^")


def test_blocks_of_a_power_of_two_each(tmp_path):
    scales = torch.exp2(torch.arange(64) % 40 - 20).unsqueeze(1)
    found = key_of(tmp_path, halfstep.round_to(torch.randn(64, 64) * scales, "mxfp8"))
    assert (found.key, found.scale) == ("scaled float8_e4m3fn", "2^k")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["int8_tensor", "e4m3fn"])
def test_values_of_few_levels_under_any_scale(tmp_path, dtype, format):
    x = torch.randn(64, 64)
    scale = x.abs().max() / 448 * 1.0001
    values = halfstep.round_to(x, format) if format == "int8_tensor" else halfstep.round_to(x / scale, format) * scale
    found = key_of(tmp_path, values.to(dtype))
    assert (found.key, found.scale) == (f"scaled {'int8' if format == 'int8_tensor' else 'float8_e4m3fn'}", "any")


def test_both_casts_of_a_chain_are_named(tmp_path):
    values = torch.randn(512, 512) * 0.02
    assert key_of(tmp_path, values.bfloat16().half().float()).key == "bf16+fp16"
    assert key_of(tmp_path, values.half().float()).key == "fp16"
    assert key_of(tmp_path, values.half().bfloat16()).key == "fp16"
    assert key_of(tmp_path, values.bfloat16().float()).key == "bf16"


def test_tied_and_equal_tensors_are_told(tmp_path):
    weight = torch.randn(64, 64)
    tensors = {"a": weight, "b": weight.clone(), "c": torch.ones(64), "d": torch.ones(64), "e": weight.t().contiguous()}
    found = {t.name: t for t in halfstep.inspect(saved(tmp_path, tensors)).tensors}
    assert found["b"].duplicate_of == "a" or found["a"].duplicate_of == "b"
    assert [found[name].duplicate_of for name in "cde"] == [None] * 3
    torch.save({"a": weight, "b": weight}, tmp_path / "tied.pt")
    first, second = halfstep.inspect(tmp_path / "tied.pt").tensors
    assert (first.tied_to, second.tied_to) == (None, first.name)
    assert halfstep.inspect(tmp_path / "tied.pt").numel == weight.numel()


def test_figures_of_a_tensor_are_those_of_torch(tmp_path):
    x = torch.randn(40, 64) * torch.logspace(-9, 5.5, 40).unsqueeze(1)
    x[0, 0], x[1, 1], x[2, 2], x[3] = torch.inf, torch.nan, 1e-40, 0.0
    x[:, 7] *= 1e3
    found = halfstep.inspect(saved(tmp_path, {"w": x})).tensors[0].statistics
    finite, used = x[x.isfinite()], x[x.isfinite() & (x != 0)].abs()
    assert (found.values, found.infinities, found.nans) == (x.numel(), 1, 1)
    assert found.zeros == int((finite == 0).sum())
    assert (found.amax, found.smallest) == (float(used.max()), float(used.min()))
    assert found.subnormal == int((used < torch.finfo(torch.float32).tiny).sum()) == 1
    assert found.fp16_subnormal == int(((used >= 2.0**-24) & (used < 2.0**-14)).sum())
    assert found.fp16_below == int((used < 2.0**-24).sum())
    assert found.fp16_above == int((used >= 65536).sum()) > 0
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert found.exact[name] == pytest.approx(float((used.to(dtype).float() == used).double().mean()), abs=1e-12)
    amax = x.abs().masked_fill(~x.isfinite(), 0).amax(0)
    assert found.channels.outliers == int((amax >= 6 * amax.quantile(0.5)).sum()) == 1
    assert found.channels.largest == float(amax.max())
    json.dumps(halfstep.inspect(tmp_path).as_data(), allow_nan=False)


@pytest.mark.parametrize("place", [None, 0, -1])
def test_a_quick_look_reads_until_a_last_bit_is_in_use(tmp_path, place):
    values = torch.ones(5 << 20)  # 20 MB: more than a chunk
    values[::2] = 1.5
    if place is not None:
        values[place] = 1 + 2**-23
    save_file({"w": values}, tmp_path / "model.safetensors")
    told = []
    report = halfstep.inspect(tmp_path / "model.safetensors", quick=True, progress=told.append)
    assert report.tensors[0].origin.full == (place is not None)
    assert sum(told) == values.nbytes
    assert len(told) == (1 if place == 0 else 2)
