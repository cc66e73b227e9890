"""How one tensor was made from another: planted pairs are recognised, and nothing is claimed without evidence."""

import itertools
import math

import pytest
import torch

import halfstep
from families import for_each, in_turn, slow_unless
from halfstep.bits.pair import Pair, as_numbers, change
from halfstep.bits.relation import KINDS, relation
from halfstep.bits.values import InMemory


CASTS = ("bf16", "fp16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "tf32")
ROUNDINGS = {
    "nearest_even": "to nearest", "nearest_away": "to nearest", "toward_zero": "toward zero", "up": "up",
    "down": "down", "stochastic": "stochastically",
}  # fmt: skip


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weight(rows=96, columns=130, seed=0):
    return torch.randn(rows, columns, generator=generator(seed)) * 0.02


def related(a, b):
    return relation(Pair(InMemory(a), InMemory(b)))


@pytest.mark.quick("nearest_even-bf16", "toward_zero-fp16", "up-bf16", "down-bf16", "stochastic-bf16")
@pytest.mark.parametrize("format", CASTS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_cast_is_recognised_with_its_rounding(format, rounding):
    """Casts by `round_to`, whose own tests compare it with exact fractions."""
    x = weight()
    rounded = halfstep.round_to(x, format, rounding=rounding, generator=3)
    found = related(x, rounded)
    assert (found.kind, found.rounded.format) == ("cast", format)
    (name,) = found.rounded.roundings
    assert name.startswith(ROUNDINGS[rounding])
    assert found.rounded.telling == int((rounded != x).sum())
    back = related(rounded, x)
    assert (back.kind, back.rounded) == ("uncast", found.rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_torch_casts_are_nearest_even(dtype):
    ties = torch.arange(1, 4001, dtype=torch.float32) / 4096  # 12 bits: includes ties of bf16 and fp16
    found = related(ties, ties.to(dtype))
    assert (found.kind, found.rounded.roundings) == ("cast", ("to nearest, ties to even",))
    assert found.rounded.nearest == 1.0


def test_ties_away_from_zero_are_distinguished_from_ties_to_even():
    ties = torch.arange(1, 4001, dtype=torch.float32) / 4096
    away = halfstep.round_to(ties, "bf16", rounding="nearest_away")
    assert related(ties, away).rounded.roundings == ("to nearest, ties away from zero",)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
def test_rounded_values_in_a_wider_dtype_are_a_cast(stored):
    x = weight()
    assert related(x, x.bfloat16().to(stored)).key == "cast bf16"


def test_overflowing_values_are_counted():
    x = weight()
    x[0, :3] = torch.tensor([1e6, -1e6, 70000.0])
    found = related(x, x.half())
    assert (found.kind, found.rounded.overflowing) == ("cast", 3)
    assert related(x, x.clamp(-65504, 65504).half()).rounded.overflowing == 3
    x[1, 0], x[1, 1] = math.nan, math.inf
    assert related(x, x.half()).kind == "cast"


def test_double_casts_are_distinguished_from_single_casts():
    x = weight(300, 300)
    assert related(x, x.half().bfloat16()).key == "cast fp16, then bf16"
    assert related(x * 0.001, (x * 0.001).bfloat16().half()).key == "cast bf16, then fp16"


@for_each("count", [8, 16, 32, 64, 100, 300])
def test_double_casts_of_few_values_are_not_stochastic_rounding(count):
    """Biases and norms: of 30 values, two may go to the farther neighbour through double rounding."""
    for seed in range(6):
        x = weight(1, count, seed)[0]
        found = related(x, x.half().bfloat16())
        assert found.kind == "cast" or count < 10
        assert found.rounded is None or "stochastically" not in found.rounded.roundings, seed
        noisy = related(x, halfstep.round_to(x, "bf16", rounding="stochastic", generator=seed))
        assert count < 64 or noisy.rounded.roundings == ("stochastically",), seed


def test_few_values_name_all_matching_roundings():
    found = related(torch.tensor([1.0001, 2.0]), torch.tensor([1.0, 2.0]).bfloat16())
    assert set(found.rounded.roundings) == {"to nearest", "toward zero", "down"}


def test_changed_counters_are_no_cast():
    """1000 is a bf16 value near 1001, and 1.5 one near 1.5001; a few such values are no evidence."""
    for a, b in ((1001, 1000), (torch.arange(1, 900), torch.arange(1, 900) // 8 * 8)):
        for dtype in (torch.float32, torch.int64):
            assert related(torch.as_tensor(a).to(dtype), torch.as_tensor(b).to(dtype)).kind == "changed"
    assert related(torch.tensor([1.5001, 0.7501]), torch.tensor([1.5, 0.75])).kind == "changed"


def test_cast_of_changed_values_is_near():
    x = weight(300, 300)
    moved = x * (1 + 1e-4 * torch.randn(x.shape, generator=generator(1)))
    found = related(x, moved.bfloat16())
    assert (found.kind, found.rounded.format, found.rounded.roundings) == ("near", "bf16", ())
    assert 0.95 < found.rounded.nearest < 1


def test_identical_bytes_and_equal_values_are_distinguished():
    x = weight()
    assert related(x, x.clone()).kind == "identical"
    assert related(x.bfloat16(), x.bfloat16().float()).kind == "equal"
    assert related(torch.tensor([0.0, 1.5]), torch.tensor([-0.0, 1.5])).kind == "equal"
    broken = torch.tensor([math.nan, math.inf])
    assert related(broken, broken.clone()).kind == "identical"
    assert related(broken, broken.double()).kind == "equal"
    assert related(torch.zeros(0), torch.zeros(0).half()).kind == "equal"


def test_two_casts_of_the_same_values_are_alike():
    x = weight(300, 300)
    assert related(x.half(), x.bfloat16()).kind == "alike"
    assert related(x.half(), (x * 1.02).bfloat16()).kind != "alike"


@pytest.mark.parametrize("factor", [0.5, -4.0, 1.25, 0.7, 1 / math.sqrt(256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_copy_is_a_multiple_with_its_factor(factor, dtype):
    x = (weight() * 10).to(dtype)
    found = related(x, (x.float() * factor).to(dtype))
    assert found.kind == "multiple"
    assert found.factor == pytest.approx(factor, rel=2e-3)


def test_factor_near_one_is_not_a_multiple():
    x = weight().bfloat16()
    assert related(x, (x.float() * 1.004).bfloat16()).kind != "multiple"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [1.0, 0.01])
def test_average_with_an_unseen_tensor_is_recognised(dtype, apart):
    one = weight().to(dtype)
    other = (one.float() + apart * weight(seed=1)).to(dtype)
    found = related(one, (one.float() + other.float()) / 2)
    assert found.kind == "average"
    assert found.averaged == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert related(one, 0.7 * one.float() + 0.3 * other.float()).kind == "changed"


GRIDS = ("int8_row", "int8_tensor", "int4_64", "fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "nf4")


@pytest.mark.quick("dtype0-int8_row", "dtype0-mxfp4", "dtype1-int8_tensor", "dtype1-mxfp8_e4m3")
@pytest.mark.parametrize("format", slow_unless(lambda name: name not in ("int4_64", "nvfp4"), GRIDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_values_are_recognised(format, dtype):
    x = weight(256, 384)
    found = related(x, halfstep.round_to(x, format).to(dtype))
    assert found.kind == "quantised", found.key
    assert found.grid.nearest == 1.0


def test_quantized_values_of_another_tensor_are_unrelated():
    x = weight(256, 384)
    assert related(x, halfstep.round_to(weight(256, 384, seed=1), "int8_row")).kind == "unrelated"
    moved = halfstep.round_to(x + 0.05 * weight(256, 384, seed=1), "int8_row")
    found = related(x, moved)
    assert found.kind == "changed" or found.grid.nearest < 0.9


RANKS, DTYPES = (1, 4, 16, 40), (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("rank", "dtype"), slow_unless(in_turn(RANKS, DTYPES).__contains__, itertools.product(RANKS, DTYPES))
)
def test_merged_lora_is_recognised_with_its_rank(rank, dtype):
    base = weight(320, 500).to(dtype)
    up, down = torch.randn(320, rank, generator=generator(1)), torch.randn(rank, 500, generator=generator(2))
    merged = (base.float() + 0.004 * up @ down).to(dtype)
    found = related(base, merged)
    assert (found.kind, found.low_rank.rank) == ("merged", rank)


def test_lora_merged_through_bf16_has_its_rank():
    base, up, down = weight(320, 500), torch.randn(320, 8), torch.randn(8, 500)
    merged = base + (up.bfloat16() @ down.bfloat16()).float() * 0.004
    assert related(base, merged).low_rank.rank == 8


def test_lora_below_rounding_error_is_not_found():
    base = weight(320, 500).bfloat16()
    delta = torch.randn(320, 8, generator=generator(1)) @ torch.randn(8, 500, generator=generator(2))
    assert related(base, (base.float() + 1e-7 * delta).bfloat16()).kind in ("identical", "changed")


def test_dense_changes_and_changed_rows_are_not_low_rank():
    base = weight(320, 500)
    assert related(base, base + 0.01 * weight(320, 500, seed=1)).kind == "changed"
    adam = base + 1e-4 * torch.randn(base.shape, generator=generator(1)).sign()
    assert related(base, adam).kind == "changed"
    rows = base.clone()
    rows[5:9] += 0.1
    assert related(base, rows).kind == "changed"


@for_each("rounded", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("times", [-50.0, 1e7])
def test_few_overwritten_elements_are_not_low_rank(times, rounded):
    """One overwritten element, row or column among slightly changed values is a rank-one change each."""
    x = weight(64, 96)
    for place in ((3, 5), (slice(None), 5), 3):
        y = (x * 1.0009765625 if rounded == torch.float32 else x).to(rounded).float()
        y[place] *= times if isinstance(place, tuple) and place[0] == 3 else 0
        y[3, 5] = 0.02 * times
        assert related(x, y).kind == "changed"
    flipped = x.clone()
    flipped[3, 5] = 1e37
    assert related(x, flipped).kind == "changed"


def test_figures_of_a_change():
    a, b = torch.tensor([3.0, 4.0, 1.0, math.inf]), torch.tensor([3.0, 4.5, 1.0, 2.0])
    found = change(Pair(InMemory(a), InMemory(b)))
    assert (found.values, found.unchanged, found.broken) == (4, 2, 1)
    assert found.relative == pytest.approx(0.5 / math.sqrt(26))
    assert found.cosine == pytest.approx(28 / math.sqrt(26 * 30.25))
    # 4 and 4.5 first differ in the twelfth bit (0x40800000, 0x40900000), infinity and 2 in the third.
    assert found.bits_kept == (32 + 11 + 32 + 2) / 128


def test_unrelated_values_and_integers():
    assert related(weight(), weight(seed=1)).kind == "unrelated"
    assert related(torch.arange(50), torch.arange(50)).kind == "identical"
    assert related(torch.arange(50), torch.arange(50) * 3).kind == "changed"
    assert related(torch.tensor([True, False]), torch.tensor([True, True])).kind == "changed"
    assert related(torch.ones(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.complex64)).kind == "unread"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_as_numbers_decodes_every_dtype(dtype):
    x = torch.randn(100, generator=generator()).to(dtype)
    (piece,) = InMemory(x).chunks(1 << 10)
    assert as_numbers(piece, str(dtype).removeprefix("torch.")).tolist() == x.double().tolist()


def test_kinds_are_distinct_and_complete():
    assert len(set(KINDS)) == len(KINDS) == 13
