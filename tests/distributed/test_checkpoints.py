"""A run that goes on from distributed checkpoints on other numbers of ranks has the bits of one process's run."""

import json
from pathlib import Path

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed import checkpoint

import halfstep
from ranks import on_ranks
from tiny import EVERY, SMOOTH, Gated, assert_same


pytestmark = pytest.mark.slow
OUTCOMES = json.loads((Path(__file__).parents[1] / "uses" / "outcomes.json").read_text())
UNFIT = {
    "fp8-fishman": "one factor for the whole of a moment",
    "coat": "tiles in all moments, biases' too: test_shard_codes.py has those that ranks divide",
}
NAMES = [name for name in EVERY if name not in OUTCOMES["FSDP2"] and name not in UNFIT]
WORLDS = 2, 1, 3, 2
"""Ranks of one run, two steps on each; no weight of the model has a number of rows that three divides."""


def model_of(name):
    torch.default_generator.manual_seed(0)
    inside = Gated(16, 22) if name in SMOOTH else nn.GELU()
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 16), inside, nn.LayerNorm(16), nn.Linear(16, 4))


def built(name, world, seed=5):
    """A prepared model, sharded where there are ranks."""
    from torch.distributed.fsdp import fully_shard

    model = model_of(name)
    halfstep.apply(model, name)
    if world:
        mesh = dist.init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, *halfstep.optimize(model, optimizer, generator=seed)


def steps(trained, first, last):
    """All ranks see the same rows, and the gradients of a step are set."""
    from torch.distributed.tensor import distribute_tensor

    model, optimizer, scaler = trained
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 64, generator=generator) * (1 + step)
        scaler.scale(model(x).square().mean()).backward()
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=generator) * scaler.get_scale()
            if step == 3 and p.dim() == 1 and scaler.is_enabled():
                grad[-1] = torch.inf  # on the last rank, where there are several
            grad = grad.to(p.grad.dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else grad
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def whole(value):
    """A state in which nothing is spread over ranks: gloo gathers neither 8-bit nor unsigned numbers."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if not hasattr(value, "full_tensor"):
        return value
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value.to_local())
    return torch.cat(parts, value.placements[0].dim)


def states(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def subclasses(value):
    """The classes of tensors, but torch's own, that a state is stored in, by its parts on this rank."""
    if isinstance(value, dict):
        return set().union(*map(subclasses, value.values()))
    local = value.to_local() if hasattr(value, "to_local") else value
    return {type(local)} - {torch.Tensor, nn.Parameter} if isinstance(local, torch.Tensor) else set()


def leg(name, world, first, folder):
    """Two steps after those that were saved before, and all that a run has then."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    trained = model, optimizer, scaler = built(name, world, 5 + first)  # whose seed, from then on, is the checkpoint's
    if first:
        saved = states(model, optimizer) | {"scaler": scaler}
        checkpoint.load(saved, checkpoint_id=f"{folder}/{name}-{first}")
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    steps(trained, first, first + 2)
    now = states(model, optimizer)
    assert not subclasses(now | {"scaler": scaler.state_dict()})
    if world:
        checkpoint.save(now | {"scaler": scaler}, checkpoint_id=f"{folder}/{name}-{first + 2}")
    return whole(now | {"scaler": scaler.state_dict()})


def legs(rank, folder, first):
    return {name: leg(name, dist.get_world_size(), int(first), folder) for name in NAMES}


def refused(rank):
    try:
        built("fp8-fishman", dist.get_world_size())
    except halfstep.HalfstepError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    saved, new = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp
    return [on_ranks(legs, new("ranks"), saved, 2 * i, world=world) for i, world in enumerate(WORLDS)]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_from_other_numbers_of_ranks_bit_for_bit(runs, name):
    """Weights, masters, moments, the loss scale and skipped steps, scaling states, and the seeds of noise."""
    trained = built(name, 0)
    for number, ranks in enumerate(runs):
        steps(trained, 2 * number, 2 * number + 2)
        expected = states(*trained[:2]) | {"scaler": trained[2].state_dict()}
        for rank in ranks:
            assert_same(rank[name], expected)
    moved = [not torch.equal(model_of(name).state_dict()[key], value) for key, value in expected["model"].items()]
    assert all(moved)


def test_a_moment_with_one_factor_is_refused(tmp_path):
    for said in on_ranks(refused, tmp_path):
        assert "float8_e4m3 (current, whole tensor), which needs the whole tensor, and no rank has it" in said
