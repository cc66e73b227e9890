"""Optimizers on several ranks: equal weights for any seeds, and shards equal to one process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep
from tiny import assert_same


pytestmark = pytest.mark.slow
NAMES = ["fp32", "bf16-stochastic", "bf16-master", "bf16-split", "bf16-kahan", "bf16-collage-plus", "bf16-nomaster"]


def muon(parameters):
    """Muon for matrices, which needs whole matrices, and AdamW for vectors."""
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.dim() == 2) is those] for those in (True, False))
    return halfstep.optim.Combined(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01))


KINDS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "lion": lambda ps: halfstep.optim.Lion(ps, lr=0.01),
    "lamb": lambda ps: halfstep.optim.Lamb(ps, lr=0.01),
}
if hasattr(torch.optim, "Muon"):
    KINDS["muon"] = muon
RANK = """
import sys, torch, torch.distributed as dist
rank, world, folder, tests = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
sys.path[:0] = [tests, f'{tests}/optim']
torch.set_num_threads(1)
from test_optimizer_ranks import on_a_rank
start = lambda: dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
torch.save(on_a_rank(rank, world, start), f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 13), nn.GELU(), nn.Linear(13, 7))


def replicated(rank, prepared=None, generator=None):
    """20 steps under DDP from the rank's own seed."""
    model, optimizer, _scaler = prepared or prepared_with_ranks_seed(rank, generator)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for step in range(20):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + rank))
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def prepared_with_ranks_seed(rank, generator=None):
    model = net()
    torch.manual_seed(rank)  # the usual advice, for different dropout masks on each rank
    return halfstep.prepare(model, KINDS["adamw"](model.parameters()), "bf16-stochastic", generator=generator)


def stepped(name, kind, world, ddp=False):
    """The weights and states after three steps with given gradients and a write after each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    model = net()
    halfstep.apply(model, name)
    if world and not ddp:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    seed = 5 + (torch.distributed.get_rank() if world else 0)
    optimizer, _ = halfstep.optimize(model, KINDS[kind](model.parameters()), generator=seed)
    wrapped = nn.parallel.DistributedDataParallel(model) if ddp else model
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if world and not ddp else grad
        versions = [p._version for p in model.parameters()]
        optimizer.step()
        assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
    found = list(wrapped.parameters()) + [optimizer.full(p) for p in model.parameters()]
    states = [optimizer.state[p] for p in model.parameters()]
    found += [state.get("exp_avg", state.get("momentum_buffer")) for state in states]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for t in found]


def on_a_rank(rank, world, start):
    early = prepared_with_ranks_seed(rank, rank)
    start()
    found = {"before the group": replicated(rank, early), "in it": replicated(rank)}
    found["seeds given"] = replicated(rank, generator=rank)
    for how in (False, True):
        found[how] = {(n, k): stepped(n, k, world, how) for n in NAMES for k in KINDS}
    return found


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    tests = str(Path(__file__).parent.parent)
    started = [subprocess.Popen([*command, str(rank), str(world), str(folder), tests]) for rank in range(world)]
    assert [process.wait(timeout=300) for process in started] == [0] * world
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("how", ["before the group", "in it", "seeds given"])
def test_ranks_with_different_seeds_keep_equal_weights(ranks, how):
    for rank in ranks[1:]:
        assert_same(rank[how], ranks[0][how])


def test_the_first_ranks_seed_determines_the_weights(ranks):
    """Which says that the seed decided something: rank 0's own run from that seed, with the others' gradients."""
    assert not torch.equal(ranks[0]["in it"][0], ranks[0]["seeds given"][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ddp", [False, True], ids=["fsdp", "ddp"])
def test_ranks_equal_one_process(ranks, ddp, name, kind):
    """Bit for bit, stochastic rounding included. The order in which ranks sum LAMB's norms does not show in float32."""
    expected = stepped(name, kind, 0)
    for rank in ranks:
        assert_same(rank[ddp][name, kind], expected)
