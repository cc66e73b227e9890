"""The origin of a tensor as its bits show it, the confidence in it, and the tensor's figures."""

import json
import math
from dataclasses import asdict

import pytest
import torch

import halfstep
from halfstep.bits.origin import origin, stored_format
from halfstep.bits.scan import of_scans, scan
from halfstep.bits.sentences import Evidence, verdict
from halfstep.bits.values import InMemory
from halfstep.inspection.inspector import quick_origin


def scanned(tensor):
    return scan(InMemory(tensor.contiguous()))


def key_of(tensor):
    return origin(scanned(tensor), InMemory(tensor).dtype)


def test_constants_and_counters_give_no_evidence():
    for constant in (torch.ones(4096), torch.zeros(4096), torch.arange(4096.0), torch.tensor(3.0), torch.empty(0, 4)):
        found = key_of(constant)
        assert (found.key, found.confidence, found.telling) == ("unknown", "none", 0)


FEW = torch.tensor([0.75 + i / 128 for i in range(1, 11)])
"""10 distinct values of at most 8 significant bits, neither powers of two nor integers."""


def test_equal_values_count_once():
    many, once = (key_of(values) for values in (FEW.repeat(400), FEW))
    assert many.evidence == pytest.approx(once.evidence)
    assert many.distinct == once.distinct == 10


def test_evidence_equals_the_probability_of_random_mantissas():
    """For 8 of the 10 values, since format and scale are chosen so that two fit: (127 / (2^23 - 1))^8."""
    chance = (127 / (2**23 - 1)) ** 8
    assert key_of(FEW).evidence == pytest.approx(-torch.tensor(chance, dtype=torch.float64).log2().item())


ROUNDED = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2", "bf16", "fp16", "tf32")


def five_of(name):
    """The largest values below 2 with their halves and quarters, excluding powers of two and integers."""
    eps = 2.0 ** -halfstep.formats.get(name, halfstep.formats.Float).mantissa_bits
    values = [scale * (2 - i * eps) for i in (1, 3, 5) for scale in (1, 0.5, 0.25) if i * eps < 1]
    return torch.tensor(values[:5], dtype=torch.float64)


@pytest.mark.quick(
    "float4_e2m1fn-dtype0-1",
    "float4_e2m1fn-dtype1-400",
    "float6_e2m3fn-dtype3-400",
    "bf16-dtype2-1",
    "fp16-dtype2-400",
    "tf32-dtype2-1",
)
@pytest.mark.parametrize("repeated", [1, 400])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ROUNDED)
def test_two_distinct_values_give_no_confidence(format, dtype, repeated):
    """For every format, also with zeros, powers of two and integers beside the values."""
    if halfstep.formats.get(format, halfstep.formats.Float).mantissa_bits + 2 > -math.log2(torch.finfo(dtype).eps):
        pytest.skip("not narrower than the stored type")
    values, beside = five_of(format), torch.tensor([0.0, 1.0, 3.0, 0.25, 6.0], dtype=torch.float64)
    found = [key_of(torch.cat([values[:n].repeat(repeated), beside]).to(dtype)) for n in range(1, 6)]
    assert [one.distinct for one in found] == [min(n, len(values)) for n in range(1, 6)]
    assert [one.confidence for one in found[:2]] == ["none", "none"]
    if len(values) == 5 and dtype in (torch.float32, torch.float64):
        assert found[4].through or found[4].levels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_is_no_cast(dtype):
    tensors, stored = [torch.tensor(1.5, dtype=dtype), torch.zeros(4, 4, dtype=dtype)], str(dtype)[6:]
    found = verdict([Evidence(stored, tensor.numel(), key_of(tensor)) for tensor in tensors])
    assert found.confidence == "none"
    assert found.text.startswith(f"stored {stored}, too few different values to tell")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_integers_give_evidence(dtype):
    assert key_of((torch.randn(64, 64) * 1e25).to(dtype)).key == "full"
    assert key_of((torch.randn(64, 64) * 1e25).bfloat16().float()).key == "bf16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counters_and_positions_give_no_evidence(dtype):
    counters = torch.tensor([2**24 - 1, 2**24, 12345, 16_777_215, 999_999, 7], dtype=dtype)
    for values in (
        counters,
        torch.arange(2**24 - 4096, 2**24 + 1, dtype=dtype),
        torch.tensor(2.0**24 - 1, dtype=dtype),
    ):
        found = key_of(values)
        assert (found.key, found.telling, found.confidence) == ("unknown", 0, "none")


def test_one_full_precision_value_makes_the_cast_partial():
    values = torch.randn(4096).bfloat16().float()
    assert key_of(values).key == "bf16"
    values[17] = 1 / 3
    assert key_of(values).key == "partly bf16"
    assert key_of(values).share == pytest.approx(4095 / 4096, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["e4m3fn", "e5m2", "e2m1fn"])
def test_low_bit_values_times_a_power_of_two_are_recognised(dtype, format):
    values = halfstep.round_to(torch.randn(64, 64) * 2, format).to(dtype) / 4
    found = key_of(values)
    assert found.key == f"scaled {halfstep.formats.get(format).name}"
    assert found.scale.startswith("2^")


def test_blocks_with_power_of_two_scales_are_recognised():
    scales = torch.exp2(torch.arange(64) % 40 - 20).unsqueeze(1)
    found = key_of(halfstep.round_to(torch.randn(64, 64) * scales, "mxfp8"))
    assert (found.key, found.scale) == ("scaled float8_e4m3fn", "2^k")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["int8_tensor", "e4m3fn"])
def test_low_bit_values_times_any_scale_are_recognised(dtype, format):
    x = torch.randn(64, 64)
    scale = x.abs().max() / 448 * 1.0001
    values = halfstep.round_to(x, format) if format == "int8_tensor" else halfstep.round_to(x / scale, format) * scale
    found = key_of(values.to(dtype))
    assert (found.key, found.scale) == (f"scaled {'int8' if format == 'int8_tensor' else 'float8_e4m3fn'}", "any")


def test_both_casts_of_a_chain_are_named():
    values = torch.randn(512, 512) * 0.02
    assert key_of(values.bfloat16().half().float()).key == "bf16+fp16"
    assert key_of(values.half().float()).key == "fp16"
    assert key_of(values.half().bfloat16()).key == "fp16"
    assert key_of(values.bfloat16().float()).key == "bf16"


def test_tensor_figures_equal_torch():
    x = torch.randn(40, 64) * torch.logspace(-9, 5.5, 40).unsqueeze(1)
    x[0, 0], x[1, 1], x[2, 2], x[3] = torch.inf, torch.nan, 1e-40, 0.0
    x[:, 7] *= 1e3
    (found,) = of_scans([scanned(x)], stored_format("float32"))
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
    json.dumps(asdict(found), allow_nan=False)


@pytest.mark.parametrize("place", [None, 0, -1])
def test_quick_origin_reads_until_a_last_bit_is_in_use(place):
    values = torch.ones(5 << 20)  # 20 MB: more than a chunk
    values[::2] = 1.5
    if place is not None:
        values[place] = 1 + 2**-23
    sizes = []
    assert quick_origin(InMemory(values), sizes.append).full == (place is not None)
    assert sum(sizes) == values.nbytes
    assert len(sizes) == (1 if place == 0 else 2)


def rounded(x, bits):
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)


@pytest.mark.parametrize("bits", [6, 12, 13, 14, 15, 16, 17])
def test_unknown_precisions_are_reported_by_their_bits(bits):
    """Evidence counts the bits in use: of values with 17 random bits, one in 64 is exactly fp16."""
    found = key_of(rounded(torch.randn(128, 128), bits))
    assert (found.key, found.confidence) == (f"{bits} bits", "certain")


def test_average_of_two_casts_is_recognised_as_an_average():
    one = torch.randn(256, 256)
    other = one + 0.01 * torch.randn(256, 256)
    for a, b in ((one.bfloat16(), other.bfloat16()), (one.half(), other.half())):
        found = key_of((a.float() + b.float()) / 2)
        assert (found.key, found.confidence) == (f"half {9 if a.dtype == torch.bfloat16 else 12} bits", "certain")
    assert "an average, a merge or a sum" in verdict([Evidence("float32", 1, found)]).text


def test_average_of_three_casts_is_full_precision():
    runs = [torch.randn(256, 256).bfloat16().float() for _ in range(3)]
    assert key_of(sum(runs) / 3).key == "full"


def test_product_of_bf16_values_has_16_bits():
    norm = (1 + 0.1 * torch.randn(256)).bfloat16().float()
    assert key_of(torch.randn(256, 256).bfloat16().float() * norm).key == "16 bits"


def test_partly_overwritten_cast_is_recognised():
    values = torch.randn(256, 256)
    for cast, name in ((values.bfloat16().float(), "bf16"), (values.half().float(), "fp16")):
        for share in (0.001, 0.3, 0.9):
            tuned = torch.where(torch.rand(256, 256) < share, values, cast)
            assert (key_of(tuned).key, key_of(tuned).confidence) == (f"partly {name}", "certain")


def test_fixed_point_values_are_not_fp16():
    """11 bits between 4 and 8, fewer below."""
    found = key_of((torch.rand(64, 64) * 2**11).floor() / 2**8)
    assert (found.key, found.confidence) == ("11 bits times 2^-8", "certain")
    assert "fixed-point numbers" in verdict([Evidence("float32", 1, found)]).text


@pytest.mark.parametrize("levels", [5, 16, 200])
def test_palette_is_recognised_by_its_levels(levels):
    found = key_of(torch.randn(levels)[torch.randint(levels, (256, 256))])
    assert (found.key, found.levels, found.confidence) == ("levels", levels, "certain")
    assert f"no more than {levels} different magnitudes" in verdict([Evidence("float32", 1, found)]).text


def test_levels_are_counted_over_the_whole_tensor():
    """16,384 values are sampled first; one more level elsewhere must count."""
    values = torch.randn(16)[torch.randint(16, (1024, 1024))]
    values[613, 77] = 0.123
    assert key_of(values).levels == 17
    assert key_of(torch.where(torch.arange(1024)[:, None] < 512, values, torch.randn(1024, 1024))).key == "full"


def test_narrow_bf16_values_are_not_a_palette():
    norm = (1 + 0.01 * torch.randn(4096)).bfloat16()
    assert len(norm.unique()) < 20
    assert key_of(norm).key == "full"


def test_signalling_nan_gives_no_warning():
    values = torch.randn(64, 64)
    values.view(torch.int32)[0, :3] = 0x7F800001
    assert key_of(values).key == "full"
