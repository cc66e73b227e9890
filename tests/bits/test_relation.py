"""Planted pairs: how one tensor was made from another is told, and what the bits do not show is not said."""

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


def told(a, b):
    return relation(Pair(InMemory(a), InMemory(b)))


@pytest.mark.quick("nearest_even-bf16", "toward_zero-fp16", "up-bf16", "down-bf16", "stochastic-bf16")
@pytest.mark.parametrize("format", CASTS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_cast_is_told_with_its_rounding(format, rounding):
    """The casts are those of `round_to`, whose tests compare it with exact fractions."""
    x = weight()
    rounded = halfstep.round_to(x, format, rounding=rounding, generator=3)
    found = told(x, rounded)
    assert (found.kind, found.rounded.format) == ("cast", format)
    (name,) = found.rounded.roundings
    assert name.startswith(ROUNDINGS[rounding])
    assert found.rounded.telling == int((rounded != x).sum())
    back = told(rounded, x)
    assert (back.kind, back.rounded) == ("uncast", found.rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cast_of_torch_is_to_nearest_and_ties_to_even(dtype):
    ties = torch.arange(1, 4001, dtype=torch.float32) / 4096  # 12 bits: ties of bf16 and of fp16 among them
    found = told(ties, ties.to(dtype))
    assert (found.kind, found.rounded.roundings) == ("cast", ("to nearest, ties to even",))
    assert found.rounded.nearest == 1.0


def test_ties_away_from_zero_are_told_from_ties_to_even():
    ties = torch.arange(1, 4001, dtype=torch.float32) / 4096
    away = halfstep.round_to(ties, "bf16", rounding="nearest_away")
    assert told(ties, away).rounded.roundings == ("to nearest, ties away from zero",)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rounded_tensor_in_a_wider_type_is_a_cast_too(stored):
    x = weight()
    assert told(x, x.bfloat16().to(stored)).key == "cast bf16"


def test_values_beyond_the_largest_one_are_counted():
    x = weight()
    x[0, :3] = torch.tensor([1e6, -1e6, 70000.0])
    found = told(x, x.half())
    assert (found.kind, found.rounded.overflowing) == ("cast", 3)
    assert told(x, x.clamp(-65504, 65504).half()).rounded.overflowing == 3
    x[1, 0], x[1, 1] = math.nan, math.inf
    assert told(x, x.half()).kind == "cast"


def test_two_casts_one_after_the_other_are_told_from_one():
    x = weight(300, 300)
    assert told(x, x.half().bfloat16()).key == "cast fp16, then bf16"
    assert told(x * 0.001, (x * 0.001).bfloat16().half()).key == "cast bf16, then fp16"


@for_each("count", [8, 16, 32, 64, 100, 300])
def test_two_casts_of_few_values_are_no_stochastic_rounding(count):
    """Biases and norms: of 30 values two may go to the farther neighbour because they were rounded before."""
    for seed in range(6):
        x = weight(1, count, seed)[0]
        found = told(x, x.half().bfloat16())
        assert found.kind == "cast" or count < 10
        assert found.rounded is None or "stochastically" not in found.rounded.roundings, seed
        noisy = told(x, halfstep.round_to(x, "bf16", rounding="stochastic", generator=seed))
        assert count < 64 or noisy.rounded.roundings == ("stochastically",), seed


def test_few_values_name_every_rounding_that_fits():
    found = told(torch.tensor([1.0001, 2.0]), torch.tensor([1.0, 2.0]).bfloat16())
    assert set(found.rounded.roundings) == {"to nearest", "toward zero", "down"}


def test_a_counter_that_moved_is_no_cast():
    """1000 is a bf16 number beside 1001, and 1.5 one beside 1.5001: of so few values that says nothing."""
    for a, b in ((1001, 1000), (torch.arange(1, 900), torch.arange(1, 900) // 8 * 8)):
        for dtype in (torch.float32, torch.int64):
            assert told(torch.as_tensor(a).to(dtype), torch.as_tensor(b).to(dtype)).kind == "changed"
    assert told(torch.tensor([1.5001, 0.7501]), torch.tensor([1.5, 0.75])).kind == "changed"


def test_a_cast_of_values_that_had_moved_is_no_cast():
    x = weight(300, 300)
    moved = x * (1 + 1e-4 * torch.randn(x.shape, generator=generator(1)))
    found = told(x, moved.bfloat16())
    assert (found.kind, found.rounded.format, found.rounded.roundings) == ("near", "bf16", ())
    assert 0.95 < found.rounded.nearest < 1


def test_the_same_bytes_and_the_same_values():
    x = weight()
    assert told(x, x.clone()).kind == "identical"
    assert told(x.bfloat16(), x.bfloat16().float()).kind == "equal"
    assert told(torch.tensor([0.0, 1.5]), torch.tensor([-0.0, 1.5])).kind == "equal"
    broken = torch.tensor([math.nan, math.inf])
    assert told(broken, broken.clone()).kind == "identical"
    assert told(broken, broken.double()).kind == "equal"
    assert told(torch.zeros(0), torch.zeros(0).half()).kind == "equal"


def test_two_roundings_of_the_same_values_are_alike():
    x = weight(300, 300)
    assert told(x.half(), x.bfloat16()).kind == "alike"
    assert told(x.half(), (x * 1.02).bfloat16()).kind != "alike"


@pytest.mark.parametrize("factor", [0.5, -4.0, 1.25, 0.7, 1 / math.sqrt(256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_factor_is_told(factor, dtype):
    x = (weight() * 10).to(dtype)
    found = told(x, (x.float() * factor).to(dtype))
    assert found.kind == "multiple"
    assert found.factor == pytest.approx(factor, rel=2e-3)


def test_a_factor_near_one_is_not_told_from_an_update():
    x = weight().bfloat16()
    assert told(x, (x.float() * 1.004).bfloat16()).kind != "multiple"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [1.0, 0.01])
def test_an_average_with_a_tensor_that_is_not_there(dtype, apart):
    one = weight().to(dtype)
    other = (one.float() + apart * weight(seed=1)).to(dtype)
    found = told(one, (one.float() + other.float()) / 2)
    assert found.kind == "average"
    assert found.averaged == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert told(one, 0.7 * one.float() + 0.3 * other.float()).kind == "changed"


GRIDS = ("int8_row", "int8_tensor", "int4_64", "fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "nf4")


@pytest.mark.quick("dtype0-int8_row", "dtype0-mxfp4", "dtype1-int8_tensor", "dtype1-mxfp8_e4m3")
@pytest.mark.parametrize("format", slow_unless(lambda name: name not in ("int4_64", "nvfp4"), GRIDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_rounded_to_a_grid(format, dtype):
    x = weight(256, 384)
    found = told(x, halfstep.round_to(x, format).to(dtype))
    assert found.kind == "quantised", found.key
    assert found.grid.nearest == 1.0


def test_a_grid_of_other_values_is_not_said_to_be_of_these():
    x = weight(256, 384)
    assert told(x, halfstep.round_to(weight(256, 384, seed=1), "int8_row")).kind == "unrelated"
    moved = halfstep.round_to(x + 0.05 * weight(256, 384, seed=1), "int8_row")
    found = told(x, moved)
    assert found.kind == "changed" or found.grid.nearest < 0.9


RANKS, DTYPES = (1, 4, 16, 40), (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("rank", "dtype"), slow_unless(in_turn(RANKS, DTYPES).__contains__, itertools.product(RANKS, DTYPES))
)
def test_a_merged_lora_is_told_with_its_rank(rank, dtype):
    base = weight(320, 500).to(dtype)
    up, down = torch.randn(320, rank, generator=generator(1)), torch.randn(rank, 500, generator=generator(2))
    merged = (base.float() + 0.004 * up @ down).to(dtype)
    found = told(base, merged)
    assert (found.kind, found.low_rank.rank) == ("merged", rank)


def test_a_product_formed_in_bf16_is_of_its_rank():
    base, up, down = weight(320, 500), torch.randn(320, 8), torch.randn(8, 500)
    merged = base + (up.bfloat16() @ down.bfloat16()).float() * 0.004
    assert told(base, merged).low_rank.rank == 8


def test_a_lora_below_what_rounding_leaves_is_not_found():
    base = weight(320, 500).bfloat16()
    delta = torch.randn(320, 8, generator=generator(1)) @ torch.randn(8, 500, generator=generator(2))
    assert told(base, (base.float() + 1e-7 * delta).bfloat16()).kind in ("identical", "changed")


def test_a_dense_change_and_one_of_few_rows_have_no_low_rank():
    base = weight(320, 500)
    assert told(base, base + 0.01 * weight(320, 500, seed=1)).kind == "changed"
    adam = base + 1e-4 * torch.randn(base.shape, generator=generator(1)).sign()
    assert told(base, adam).kind == "changed"
    rows = base.clone()
    rows[5:9] += 0.1
    assert told(base, rows).kind == "changed"


@for_each("rounded", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("times", [-50.0, 1e7])
def test_a_few_written_places_are_no_merge_and_hide_nothing(times, rounded):
    """A flipped bit, a row or a column of zeros among values that are all a little different: one rank each."""
    x = weight(64, 96)
    for place in ((3, 5), (slice(None), 5), 3):
        y = (x * 1.0009765625 if rounded == torch.float32 else x).to(rounded).float()
        y[place] *= times if isinstance(place, tuple) and place[0] == 3 else 0
        y[3, 5] = 0.02 * times
        assert told(x, y).kind == "changed"
    flipped = x.clone()
    flipped[3, 5] = 1e37
    assert told(x, flipped).kind == "changed"


def test_figures_of_a_change():
    a, b = torch.tensor([3.0, 4.0, 1.0, math.inf]), torch.tensor([3.0, 4.5, 1.0, 2.0])
    found = change(Pair(InMemory(a), InMemory(b)))
    assert (found.values, found.unchanged, found.broken) == (4, 2, 1)
    assert found.relative == pytest.approx(0.5 / math.sqrt(26))
    assert found.cosine == pytest.approx(28 / math.sqrt(26 * 30.25))
    # 4 and 4.5 differ from the twelfth bit on (0x40800000, 0x40900000), infinity and 2 from the third.
    assert found.bits_kept == (32 + 11 + 32 + 2) / 128


def test_unrelated_values_and_integers():
    assert told(weight(), weight(seed=1)).kind == "unrelated"
    assert told(torch.arange(50), torch.arange(50)).kind == "identical"
    assert told(torch.arange(50), torch.arange(50) * 3).kind == "changed"
    assert told(torch.tensor([True, False]), torch.tensor([True, True])).kind == "changed"
    assert told(torch.ones(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.complex64)).kind == "unread"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_numbers_are_those_of_the_bits(dtype):
    x = torch.randn(100, generator=generator()).to(dtype)
    (piece,) = InMemory(x).chunks(1 << 10)
    assert as_numbers(piece, str(dtype).removeprefix("torch.")).tolist() == x.double().tolist()


def test_kinds_are_all_that_there_are():
    assert len(set(KINDS)) == len(KINDS) == 13
