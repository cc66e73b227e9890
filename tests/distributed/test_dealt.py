"""Dealt: whole tensors distributed over ranks give the weights of replicated states, for a share of their bytes."""

import pytest
import torch
from torch import distributed as dist, nn

import halfstep
from halfstep.distributed import Dealt, reduce_gradients
from halfstep.errors import ModelError
from halfstep.recipe import FP8_LM
from ranks import on_ranks
from tiny import assert_same


pytestmark = pytest.mark.slow
NAMES = (
    "fp32", "bf16-master", "fp16-mixed", "adamw-8bit", "fp8-delayed", "fp8lm-o1", "fp8lm-o2", "fp8lm-o3",
    "bf16-stochastic",
)  # fmt: skip
SENT = (None, FP8_LM)
CLIPPED = [
    ("fp16-mixed", "halfstep", None), ("fp16-mixed", "torch", None), ("bf16-master", "halfstep", None),
    ("fp16-mixed", None, 2), ("fp16-mixed", "halfstep", 1),
]  # fmt: skip


def trained(name, communication, deals, clip=None, overflow=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 32))
    dealt = Dealt(model) if deals else None
    parameters = dealt.parameters if deals else model.parameters()
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(parameters, lr=1e-2), name, generator=3)
    if deals:
        dealt.attach(optimizer)
    for step in range(4):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        scaler.scale((model(x) - x).square().mean()).backward()
        if step == overflow and dist.get_rank() == 1:
            model[0].weight.grad[0, 0] = torch.inf
        reduce_gradients(model, communication)
        if clip == "halfstep":
            scaler.clip_grad_norm_(optimizer, 0.02)
        elif clip == "torch":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    kept = sum(value.nbytes for value in states if value.dim())
    left = sum(p.grad is not None for p in model.parameters())
    weights = {n: p.detach().clone().float() for n, p in model.named_parameters()}
    count = sum(p.numel() for p in model.parameters())
    return weights, kept / count, left, 0.0 if dealt is None else dealt.exchange.sent / (5 * count)


def everything(rank):
    found = {
        (name, i): [trained(name, sent, deals) for deals in (True, False)]
        for name in NAMES
        for i, sent in enumerate(SENT)
    }
    for name, clip, overflow in CLIPPED:
        found[name, clip, overflow] = [trained(name, None, deals, clip, overflow) for deals in (True, False)]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    dealt = Dealt(model)
    wrong = {
        "few": lambda: Dealt(nn.Linear(2, 2, bias=False)),
        "stock": lambda: dealt.attach(torch.optim.SGD(dealt.parameters, lr=0.1)),
        "all": lambda: dealt.attach(halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")[1]),
    }
    for name, what in wrong.items():
        found[name] = ""
        try:
            what()
        except ModelError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(everything, tmp_path_factory.mktemp("ranks"), world=3)


@pytest.mark.parametrize("sent", range(len(SENT)))
@pytest.mark.parametrize("name", NAMES)
def test_weights_equal_those_under_replicated_states(ranks, name, sent):
    dealt = [rank[name, sent][0] for rank in ranks]
    for each in dealt[1:]:
        assert_same(each[0], dealt[0][0])
    if name != "bf16-stochastic":  # its noise depends on the parameter's index in the optimizer
        assert_same(dealt[0][0], ranks[0][name, sent][1][0])
    assert [each[2] for each in dealt] == [0, 0, 0], "no gradient is left"


@pytest.mark.parametrize("name", NAMES)
def test_states_are_balanced_over_ranks(ranks, name):
    """Largest first: of 6144, 3072 and 2048 elements, and biases, no rank has more than the largest and what fits."""
    whole = ranks[0][name, 0][1][1]
    parts = [rank[name, 0][0][1] for rank in ranks]
    assert sum(parts) == pytest.approx(whole, rel=0.02)  # scales of whole tensors aside
    assert max(parts) <= 0.6 * whole


def test_weights_stored_as_codes_are_sent_as_codes(ranks):
    """One byte per element of fp8lm-o3, where float32 sends four: to each of two others, padded to the longest
    share."""
    sent = {name: [rank[name, 0][0][3] for rank in ranks] for name in ("fp32", "fp8lm-o3")}
    for few, many in zip(sent["fp8lm-o3"], sent["fp32"], strict=True):
        assert few < 0.3 * many


@pytest.mark.parametrize("case", CLIPPED)
def test_norms_and_overflows_cover_the_whole_model(ranks, case):
    for rank in ranks:
        dealt, whole = rank[case]
        assert_same(dealt[0], whole[0])


def test_attaching_an_optimizer_of_other_tensors_raises(ranks):
    for rank in ranks:
        assert "a SGD was given; expected the optimizer that halfstep.prepare gives back" in rank["stock"]
        assert "steps 4 parameters, of which" in rank["all"]
        assert "build it on dealt.parameters" in rank["all"]


def test_fewer_tensors_than_ranks_raises(ranks):
    assert [bool(rank["few"]) for rank in ranks] == [False, True, True]
    assert "1 parameters for 3 ranks: rank 1 gets none" in ranks[1]["few"]
