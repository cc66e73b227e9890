"""Masters of every kind: exact or approximate as documented, and the fused update equals the reference."""

import copy

import numpy as np
import pytest
import torch

import halfstep
from halfstep.quant.masters import get_master, list_masters
from halfstep.recipe import get_recipe
from oracles.numbers import same_bits
from tiny import adamw, assert_same, copied, mlp, prepared, train


pytestmark = pytest.mark.cpu
KINDS = list_masters()
RECIPES = ["bf16-master", "bf16-split", "bf16-kahan", "bf16-collage-light", "bf16-collage-plus"]


def start(kind, value, count=1):
    full = torch.full((count,), float(value))
    weight = torch.empty(count, dtype=torch.bfloat16)
    return weight, get_master(kind).start(weight, full)


def moved(kind, value, update, times):
    """The weight and the master's value after adding `update` that many times."""
    master = get_master(kind)
    weight, kept = start(kind, value)
    for _ in range(times):
        master.write(weight, kept, master.read(weight, kept) + update)
    return weight.item(), master.value(weight, kept).item()


def test_names_and_bytes_of_masters():
    """As in `checkpoint.roles` and the docs."""
    expected = {"fp32": ("master", 4), "split": ("low", 2), "kahan": ("compensation", 2), "collage": ("residual", 2)}
    expected["residue"] = ("residue", 1)
    assert expected.keys() == set(list_masters()) == set(KINDS)
    for kind, (name, size) in expected.items():
        assert {n: d.itemsize for n, d in get_master(kind).keeps.items()} == {name: size}
        assert get_master(kind).bytes == size


def test_an_unknown_master_is_refused_with_the_nearest_name():
    with pytest.raises(halfstep.HalfstepError, match="unknown master 'kahn'; nearest: kahan"):
        get_master("kahn")


@pytest.mark.parametrize(("kind", "expected"), [("none", 1.0), ("split", 2.0), ("fp32", 2.0)])
def test_exact_masters_accumulate_small_additions(kind, expected):
    """2^-12 added 4096 times to 1: plain bfloat16 does not change, exact masters reach 2."""
    assert moved(kind, 1.0, 2.0**-12, 4096) == (expected, expected)


def test_collage_accumulates_small_additions_to_within_an_ulp():
    assert moved("collage", 1.0, 2.0**-12, 4096)[1] == pytest.approx(2.0, abs=2.0**-7)


def test_kahan_reaches_the_published_sum():
    """From 1, 2000 times -1e-4: exactly 0.8; bfloat16 alone stays at 1."""
    weight, value = moved("kahan", 1.0, -1e-4, 2000)
    assert weight == pytest.approx(0.8008, abs=5e-4)
    assert value == pytest.approx(0.8011, abs=5e-4)
    assert moved("none", 1.0, -1e-4, 2000) == (1.0, 1.0)


@pytest.mark.slow
def test_kahans_compensation_is_limited_to_bfloat16():
    """1e5 terms of bf16(1e-3): bfloat16 stops at 0.5, and Kahan is 1.8 % too low, since its compensation is rounded."""
    term = torch.tensor(1e-3).bfloat16().item()
    assert moved("none", 0.0, term, 2000)[0] == 0.5
    weight, value = moved("kahan", 0.0, term, 100_000)
    assert weight == pytest.approx(98.0, abs=0.5)
    assert value == pytest.approx(98.17, abs=0.5)


@pytest.mark.parametrize("bits", [0, 0x3F800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00000001, 0x00408000])
@pytest.mark.parametrize("sign", [0, -(2**31)])
def test_split_halves_restore_any_float32(bits, sign):
    full = torch.tensor([bits + sign], dtype=torch.int32).view(torch.float32)
    weight = torch.empty(1, dtype=torch.bfloat16)
    split = get_master("split")
    kept = split.start(weight, full)
    same_bits(split.read(weight, kept), full)
    same_bits(weight, halfstep.round_to(full, "bf16", "nearest_away", "ieee", dtype=torch.bfloat16))


def test_split_halves_restore_random_float32():
    full = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int32).view(torch.float32)
    full = full[full.isfinite()]
    weight = torch.empty(full.shape, dtype=torch.bfloat16)
    split = get_master("split")
    same_bits(split.read(weight, split.start(weight, full)), full)


def test_a_residue_is_float32_rounded_to_16_significant_bits():
    """Compared with numpy's rint of the significand times 2^16, in float64, where both are exact."""
    full = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int32).view(torch.float32)
    full = full[full.isfinite() & (full.abs() > 2.0**-126) & (full.abs() < 2.0**127)]
    weight = torch.empty(full.shape, dtype=torch.bfloat16)
    residue = get_master("residue")
    kept = residue.start(weight, full)
    significand, exponent = np.frexp(full.double().numpy())
    expected = np.ldexp(np.rint(significand * 2.0**16), exponent - 16)
    assert np.array_equal(residue.read(weight, kept).double().numpy(), expected)
    assert np.abs(expected / full.double().numpy() - 1).max() <= 2.0**-16
    wide = torch.from_numpy(expected).float()
    same_bits(weight, halfstep.round_to(wide, "bf16", "nearest_away", "ieee", dtype=torch.bfloat16))


def test_a_residue_accumulates_small_updates_and_handles_nonfinite_values():
    assert moved("residue", 1.0, 2.0**-12, 4096) == (2.0, 2.0)
    assert moved("residue", 1.0, 2.0**-16, 9)[1] == 1.0  # half of its spacing is a tie, and rounds to even
    weight, kept = start("residue", 1 - 2.0**-10)
    residue = get_master("residue")
    for value in (float("inf"), float("-inf"), float("nan"), 3.4e38):
        residue.write(weight, kept, torch.tensor([value]))
        assert str(residue.read(weight, kept).item()) == str(value) or value == 3.4e38
        assert not residue.read(weight, kept).isnan().any() or value != value
    kept["residue"].fill_(1)
    weight.fill_(float("inf"))
    residue.follow(weight, kept)
    assert residue.read(weight, kept).item() == float("inf")


@pytest.mark.slow
def test_split_equals_an_fp32_master_bit_for_bit():
    """200 steps, compared with an fp32 AdamW whose forward uses the weights rounded to nearest, ties away."""
    model, optimizer, scaler = prepared("bf16-split")
    twin = copy.deepcopy(model)
    full = [get_master(optimizer.recipe.master).read(p, optimizer.state[p]) for p in model.parameters()]
    plain = halfstep.optim.LowBit(
        [{**adamw(mlp()).param_groups[0], "params": [torch.nn.Parameter(f) for f in full]}],
        optimizer.rule,
        halfstep.get_recipe("fp32"),
        0,
    )
    masters = plain.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        data = torch.randn(12, 8, generator=generator), torch.randn(12, 4, generator=generator)
        train(model, optimizer, scaler, steps=1, data=data)
        torch.nn.functional.mse_loss(twin(data[0]), data[1]).backward()
        for master, weight in zip(masters, twin.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        plain.step()
        with torch.no_grad():
            for master, weight in zip(masters, twin.parameters(), strict=True):
                weight.copy_(halfstep.round_to(master.detach(), "bf16", "nearest_away", "ieee"))
    for master, weight in zip(masters, model.parameters(), strict=True):
        same_bits(get_master(optimizer.recipe.master).read(weight, optimizer.state[weight]), master.detach())


@pytest.mark.quick("bf16-master", "bf16-kahan")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_fused_update_equals_the_reference(recipe):
    results = []
    for watched in (False, True):
        model, optimizer, scaler = prepared(recipe)
        if watched:
            with optimizer.watched(lambda update: None):
                train(model, optimizer, scaler, steps=20)
        else:
            train(model, optimizer, scaler, steps=20)
        results.append((copied(model.state_dict()), copied(optimizer.state_dict()["state"])))
    assert_same(*results)


@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_follow_an_overwritten_weight(recipe):
    model, optimizer, scaler = prepared(recipe)
    train(model, optimizer, scaler, steps=5)
    weight = model[0].weight
    with torch.no_grad():
        weight.fill_(2.0**-20)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, scaler, steps=1)
    value = get_master(optimizer.recipe.master).value(weight, optimizer.state[weight])
    torch.testing.assert_close(value, torch.full_like(value, 2.0**-20), rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_start_from_the_unrounded_weights(recipe):
    """16 bits more than bfloat16's 8 hold all or nearly all of float32's."""
    full = {name: p.detach().clone() for name, p in mlp().named_parameters()}
    model, optimizer, _ = prepared(recipe)
    exact = get_recipe(recipe).master in ("fp32", "split")
    for name, weight in model.named_parameters():
        value = get_master(optimizer.recipe.master).value(weight, optimizer.state[weight])
        torch.testing.assert_close(value, full[name], rtol=0 if exact else 2.0**-16, atol=0)


@pytest.mark.slow
def test_second_moments_with_a_residual_converge():
    """v with a constant g and beta2 = 0.999: bfloat16 stops, since 1 - 0.001 rounds to 1; the pair reaches g^2."""
    v = {}
    for recipe in ("bf16-collage-light", "bf16-collage-plus"):
        weight = torch.nn.Parameter(torch.ones(4))
        model = torch.nn.Module()
        model.weight = weight
        model, optimizer, _ = halfstep.prepare(model, torch.optim.AdamW([weight], lr=0.0), recipe)
        for _ in range(6000):
            weight.grad = torch.full_like(weight, 0.5)
            optimizer.step()
        state = optimizer.state[weight]
        v[recipe] = state["exp_avg_sq"].float() + state.get("exp_avg_sq_residual", torch.zeros(4)).float()
    torch.testing.assert_close(v["bf16-collage-plus"], torch.full((4,), 0.25), rtol=0.01, atol=0)
    assert (v["bf16-collage-light"] < 0.2).all()


@pytest.mark.parametrize("recipe", ["bf16-fp32grad", "bf16-megatron"])
def test_gradients_accumulate_in_float32(recipe):
    """256 micro-batches whose gradients are 1 and then 2^-9, which would vanish in bfloat16."""
    model = torch.nn.Linear(1, 1, bias=False)
    model, _, _ = halfstep.prepare(model, adamw(model), recipe)
    for copied_model in (model, copy.deepcopy(model)):
        for size in [1.0] + [2.0**-9] * 256:
            copied_model(torch.full((1, 1), size)).sum().backward()
        assert copied_model.weight.grad.dtype == torch.float32
        assert copied_model.weight.grad.item() == 1.5
    halfstep.revert(model)
    model.weight.grad = None
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32
