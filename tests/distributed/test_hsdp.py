"""FSDP2 over a two-dimensional mesh (HSDP): shards within a group of ranks, replicas over groups."""

import pytest
import torch
from torch import distributed as dist, nn

import halfstep
from halfstep.distributed import compress
from halfstep.recipe import FP8
from ranks import on_ranks
from tiny import assert_same


pytestmark = pytest.mark.slow
NAMES = "fp32", "bf16-stochastic", "bf16-master", "fp16-mixed", "fp8-delayed", "fp8-current", "adamw-8bit"
WIDE = 64


def rows(step, rank):
    return torch.randn(8, WIDE, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(name, shape, communication=None):
    """Weights after three steps, of one process, or of ranks in a mesh; and the bytes sent within shards."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, 128), nn.GELU(), nn.Linear(128, WIDE))
    halfstep.apply(model, name)
    state = None
    if shape:
        names = ("replicate", "shard")[-len(shape) :]
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        state = None if communication is None else compress(model, communication)
    optimizer, scaler = halfstep.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), generator=5)
    ranks = range(4) if not shape else [dist.get_rank()]
    for step in range(3):
        for rank in ranks:
            loss = (model(rows(step, rank)) - rows(step, rank)).square().mean() / len(ranks)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return {n: p.detach().clone() for n, p in whole.items()}, 0 if state is None else state.exchange.sent


def everything(rank):
    found = {name: trained(name, (2, 2))[0] for name in NAMES}
    found["FP8"] = {shape: trained("bf16-mixed", shape, FP8) for shape in ((2, 2), (4,))}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(everything, tmp_path_factory.mktemp("ranks"), world=4)


def relative_distance(found, expected):
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(WIDE, 128), nn.GELU(), nn.Linear(128, WIDE)).state_dict()
    off = sum(float((found[n].float() - expected[n].float()).square().sum()) for n in start)
    return (off / sum(float((expected[n].float() - start[n]).square().sum()) for n in start)) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_four_ranks_of_two_groups_train_as_one_process(ranks, name):
    """Noise depends on an element's index in the whole weight, so replicas of a shard stay equal. Gradients are summed
    in another order, and rounded by each rank."""
    expected = trained(name, ())[0]
    for rank in ranks:
        assert_same(rank[name], ranks[0][name])
    assert relative_distance(ranks[0][name], expected) < (
        0.04 if expected["0.weight"].dtype == torch.bfloat16 else 1e-5
    )


def test_gradients_are_sent_as_codes_within_shard_groups(ranks):
    """The groups' sums are all-reduced by torch, in float32. So codes equal those of plain FSDP2."""
    expected, _ = trained("bf16-mixed", ())
    (found, sent), (plain, more) = (ranks[0]["FP8"][shape] for shape in ((2, 2), (4,)))
    assert_same(found, plain)
    assert 0 < relative_distance(found, expected) < 0.04
    elements = 3 * sum(p.numel() for p in found.values())
    assert elements / 2 < sent < 1.05 * elements / 2
    assert elements * 3 / 4 < more < 1.1 * elements * 3 / 4
