"""DDP's buckets in few bits, on two processes: against explicit rounding, and errors."""

import copy
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.distributed import Reduction, compress, fp8_hook
from halfstep.recipe import FP4, FP8, get_recipe
from ranks import on_ranks
from tiny import assert_same


pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "ranks.py"


class Branches(nn.Module):
    """Layers of which one is used on some ranks, and one on none."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(40, 40) for _ in range(3))

    def forward(self, x, second=True):
        x = self.first(x).relu()
        return self.second(x) if second else x


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 40))


def rows(step, rank):
    return torch.randn(6, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def grads(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def error_of(work):
    try:
        return work() or ""
    except halfstep.HalfstepError as error:
        return str(error)


def one_bucket(rank):
    """Two ranks' gradients before and after the hook."""
    found = {}
    for kind, dtype in (("float", torch.float32), ("bf16", torch.bfloat16), ("half", torch.float16)):
        model = model_of().to(dtype)
        ddp, given = DistributedDataParallel(model), []
        state = Reduction(FP8)

        def hook(state, bucket, given=given):
            given.extend((p, g.clone().flatten()) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True))
            return fp8_hook(state, bucket)

        hook.__annotations__ = {}
        ddp.register_comm_hook(state, hook)
        ddp(rows(0, rank).to(dtype)).float().square().mean().backward()
        found[kind] = [g for _, g in given], [p.grad.flatten() for p, _ in given], state.exchange.sent
    return found


def ways(rank):
    """Weights after some steps, by options of DDP."""
    found = {}
    for way, options in (
        ("plain", {}),
        ("small buckets", {"bucket_cap_mb": 0.001}),
        ("views", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
        ("static graph", {"static_graph": True}),
        ("accumulated", {}),
    ):
        model = model_of()
        ddp = DistributedDataParallel(model, **options)
        compress(ddp, FP8)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(20):
            for i in range(2):
                with ddp.no_sync() if way == "accumulated" and not i else nullcontext():
                    ddp(rows(2 * step + i, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[way] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def unused(rank):
    torch.manual_seed(0)
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    compress(ddp, FP8)
    ddp(rows(0, rank), second=rank == 0).square().mean().backward()
    return grads(model)


def joined(rank):
    model = model_of()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    compress(ddp, FP8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddp.join():
        for step in range(2 + 3 * rank):
            ddp(rows(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def joined_by_active_ranks(rank):
    model = model_of()
    ddp = DistributedDataParallel(model)
    compress(ddp, FP8)

    def work():
        with ddp.join(divide_by_initial_world_size=False):
            for step in range(2 + rank):
                ddp(rows(step, rank)).square().mean().backward()

    return error_of(work)


def overflowing(rank):
    """Whether both ranks skip a step in which one's loss is infinite; and the loss scale."""
    model = model_of()
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-mixed")
    ddp = DistributedDataParallel(model)
    compress(ddp, FP8)
    before = copy.deepcopy(model.state_dict())
    loss = ddp(rows(0, rank)).square().mean() * (float("inf") if rank else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return [torch.equal(before[name], value) for name, value in model.state_dict().items()], scaler.get_scale()


def trained_with_feedback(rank, name, saved=None, until=6):
    """Weights, and the saved state, after steps with 4-bit gradients, from the start or from a state."""
    model = model_of()
    recipe = get_recipe(name)
    if saved is not None:
        model.load_state_dict(saved["model"])
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe)
    ddp = DistributedDataParallel(model)
    compress(ddp, FP4, scaler=scaler)
    if saved is not None:
        scaler.load_state_dict(saved["scaler"])
    start = 0 if saved is None else 3
    for step in range(start, until):
        scaler.scale(ddp(rows(step, rank)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {"model": copy.deepcopy(model.state_dict()), "scaler": scaler.state_dict()}


def resumed(rank):
    found = {}
    for name in ("bf16-mixed", "fp16-mixed"):
        whole = trained_with_feedback(rank, name)
        half = trained_with_feedback(rank, name, until=3)
        found[name] = whole, trained_with_feedback(rank, name, half)
    return found


def everything(rank):
    return {
        work.__name__: work(rank)
        for work in (one_bucket, ways, unused, joined, joined_by_active_ranks, overflowing, resumed)
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(everything, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ["float", "bf16", "half"])
def test_a_buckets_mean_is_rounded_twice(ranks, kind):
    (first, after, sent), (second, same, _) = (rank["one_bucket"][kind] for rank in ranks)
    quantizer = FP8.gradients.quantizer

    def rounded(x):  # each parameter begins with a block of its own
        return quantizer(F.pad(x.float(), (0, -len(x) % 128))[None])[0, : len(x)]

    for one, other, mean in zip(first, second, after, strict=True):
        assert torch.equal(mean, rounded((rounded(one) + rounded(other)) / 2).to(mean.dtype))
    assert_same(after, same)
    share = -(-(2 * 2560 + 2 * 128) // 256) * 128
    assert sent == 2 * (-(-(share + share // 128) // 8) * 8)  # parts start at multiples of 8 bytes


def test_options_of_ddp_agree_over_ranks_and_with_stock(ranks):
    assert_same(ranks[0]["ways"]["plain"], ranks[0]["ways"]["small buckets"])  # buckets do not change the result
    for way, first in ranks[0]["ways"].items():
        assert_same(first, ranks[1]["ways"][way])
        expected = stock_weights(2)
        for name, value in expected.items():
            moved = (value - dict(model_of().named_parameters())[name]).norm()
            assert 0 < (first[name] - value).norm() < 0.05 * moved, (way, name)


def stock_weights(micro_batches):
    """Stock fp32 in one process, on both ranks' rows."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        for i in range(micro_batches):
            both = [model(rows(2 * step + i, rank)).square().mean() for rank in (0, 1)]
            (sum(both) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_unused_layers_count_as_zeros_or_have_no_gradient(ranks):
    torch.manual_seed(0)
    model = Branches()
    (sum(model(rows(0, rank), second=rank == 0).square().mean() for rank in (0, 1)) / 2).backward()
    for rank in ranks:
        assert rank["unused"]["never.weight"] is None
        for name, expected in grads(model).items():
            if expected is not None:
                assert (rank["unused"][name] - expected).norm() < 0.05 * expected.norm()
    assert_same(ranks[0]["unused"], ranks[1]["unused"])


def test_joined_ranks_send_zeros(ranks):
    assert_same(ranks[0]["joined"], ranks[1]["joined"])
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        there = [rank for rank in (0, 1) if step < 2 + 3 * rank]
        (sum(model(rows(step, rank)).square().mean() for rank in there) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        moved = (value - dict(model_of().named_parameters())[name]).norm()
        assert (ranks[0]["joined"][name] - value).norm() < 0.05 * moved


def test_join_that_divides_by_active_ranks_raises(ranks):
    for rank in ranks:
        assert "divide_by_initial_world_size" in rank["joined_by_active_ranks"]


def test_an_infinity_on_one_rank_skips_the_step_on_all(ranks):
    for rank in ranks:
        unchanged, scale = rank["overflowing"]
        assert all(unchanged)
        assert scale == 2**15


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed"])
def test_error_feedback_is_saved_in_the_scalers_state(ranks, name):
    for number, rank in enumerate(ranks):
        whole, after = rank["resumed"][name]
        assert_same(whole["model"], after["model"])
        own = f"rounding errors of rank {number} of 2"
        kept = whole["scaler"]["halfstep"]["communication"][own]
        assert_same(kept, after["scaler"]["halfstep"]["communication"][own])
        assert sum(float(value.abs().sum()) for value in kept.values()) > 0


@pytest.mark.parametrize(
    ("how", "recipe"), [("ddp", "fp16-mixed"), ("own", "bf16-megatron"), ("fsdp", "fp8-block"), ("tp", "fp8-rowwise")]
)
def test_the_ranks_example_trains_under_torchrun(how, recipe):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLE), how, "--recipe", recipe],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    first, last = map(float, re.search(rf"{how}, {recipe}: loss (\S+) to (\S+) on 2 ranks", done.stdout).groups())
    assert last < 0.75 * first
