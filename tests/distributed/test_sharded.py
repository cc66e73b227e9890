"""FSDP2 with weights gathered and gradients scattered in few bits, on two and three processes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.distributed import compress
from halfstep.distributed.sharded import shared
from halfstep.recipe import FP4, FP8, FP8_LM, OPERANDS, Communication, get_recipe, get_storage, list_recipes
from ranks import on_ranks
from tiny import assert_same


pytestmark = pytest.mark.slow
EIGHT = FP8.gradients
WIDE = 256  # rows and columns: whole tiles of 128 on two ranks
ALIKE = [name for name in list_recipes() if any(shared(rule.linear) for rule in get_recipe(name).rules)]


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE))


def trained(recipe, communication, rank, steps=4, policy=None):
    """Weights after some steps, and the bytes that a rank sent."""
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    if recipe is not None and get_recipe(recipe).unit_scaled:
        recipe = replace(get_recipe(recipe), unit_scaled=False)  # only the recipe's casts; unit scale is the model's
    if recipe is not None:
        halfstep.apply(model, recipe)
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **({} if policy is None else {"mp_policy": policy}))
    state = None if communication is None else compress(model, communication)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = halfstep.LossScaler(enabled=False)
    if recipe is not None:
        optimizer, scaler = halfstep.optimize(model, optimizer)
    for step in range(steps):
        x = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(10 * step + rank))
        scaler.scale((model(x).float() - x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    sent = 0 if state is None else state.exchange.sent
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}, sent


def error_of(work):
    try:
        work()
    except halfstep.HalfstepError as error:
        return str(error)
    return ""


def everything(rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    found = {"stock": trained(None, None, rank)}
    found["fp32"] = trained(None, Communication(gradients=get_storage("fp32"), weights=get_storage("fp32")), rank)
    found["gradients"] = trained(None, FP8, rank)
    found["weights"] = trained(None, Communication(weights=EIGHT), rank)
    found["both"] = trained(None, Communication(gradients=EIGHT, weights=EIGHT), rank)
    for policy, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        given = MixedPrecisionPolicy(param_dtype=dtype)
        found[policy] = trained(None, None, rank, policy=given), trained(None, FP8, rank, policy=given)
    for name in ALIKE:
        found[name] = trained(name, None, rank), trained(name, Communication(weights=OPERANDS), rank)
    found["fed back"] = error_of(lambda: trained(None, FP4, rank))
    found["fp8lm"] = error_of(lambda: trained(None, FP8_LM, rank))
    found["own recipe"] = trained(replace(get_recipe("bf16-master"), name="x", communication=FP8), None, rank, 0)[1]
    return found


def uneven(rank):
    """Results with rows that three ranks do not divide."""
    return trained(None, None, rank), trained(None, Communication(gradients=EIGHT, weights=EIGHT), rank)


def relative_distance(found, expected):
    start = {name: p.detach() for name, p in model_of().named_parameters()}
    off = sum(float((found[name] - expected[name]).square().sum()) for name in start)
    return (off / sum(float((expected[name] - p).square().sum()) for name, p in start.items())) ** 0.5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(everything, tmp_path_factory.mktemp("ranks"))


def test_float32_communication_equals_stock(ranks):
    for rank in ranks:
        assert_same(rank["fp32"][0], rank["stock"][0])


@pytest.mark.parametrize("what", ["gradients", "weights", "both"])
def test_fp8_communication_trains_near_stock_and_sends_one_byte(ranks, what):
    assert_same(ranks[0][what][0], ranks[1][what][0])
    assert 0 < relative_distance(ranks[0][what][0], ranks[0]["stock"][0]) < 0.06
    elements = sum(p.numel() for p in model_of().parameters()) / 2  # sent to the other rank
    gathers = {"gradients": 0, "weights": 2, "both": 2}[what] * 4
    scatters = {"gradients": 4, "weights": 0, "both": 4}[what]
    assert elements * (gathers + scatters) < ranks[0][what][1] < 1.02 * elements * (gathers + scatters)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_fp8_communication_under_16_bit_mixed_precision_policies(ranks, policy):
    for rank in ranks:
        (expected, _), (found, _) = rank[policy]
        assert 0 < relative_distance(found, expected) < 0.06


@pytest.mark.parametrize("name", ALIKE)
def test_weights_gathered_as_matmul_operands_change_no_bit(ranks, name):
    for rank in ranks:
        (expected, _), (found, sent) = rank[name]
        assert_same(found, expected)
        matrices = 2 * WIDE * WIDE / 2
        plain = 2 if name == "fp8-cscale" else 4
        beside = (2 * WIDE + 2 * WIDE) / 2 * plain
        assert sent <= 8 * (matrices * 1.001 + beside) + 8 * 64
        assert sent >= 8 * matrices


def test_error_feedback_and_fp8lm_raise_under_fsdp(ranks):
    for rank in ranks:
        assert "error_feedback=False" in rank["fed back"]
        assert "reduce='all_to_all'" in rank["fp8lm"]


def test_fp8_communication_with_uneven_shards(tmp_path):
    for (expected, _), (found, _) in on_ranks(uneven, tmp_path, world=3):
        assert 0 < relative_distance(found, expected) < 0.08
