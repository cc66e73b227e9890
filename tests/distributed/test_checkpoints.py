"""A run resumed from distributed checkpoints on other numbers of ranks equals one process's run bit for bit."""

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
"""World sizes of one run, two steps on each; three divides the rows of no weight of the model."""


def model_of(name):
    torch.default_generator.manual_seed(0)
    inside = Gated(16, 22) if name in SMOOTH else nn.GELU()
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 16), inside, nn.LayerNorm(16), nn.Linear(16, 4))


def built(name, world, seed=5):
    """A prepared model, sharded if world is not 0."""
    from torch.distributed.fsdp import fully_shard

    model = model_of(name)
    halfstep.apply(model, name)
    if world:
        mesh = dist.init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, *halfstep.optimize(model, optimizer, generator=seed)


def train_steps(trained, first, last):
    """All ranks see the same rows, and each step's gradients are set."""
    from torch.distributed.tensor import distribute_tensor

    model, optimizer, scaler = trained
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 64, generator=generator) * (1 + step)
        scaler.scale(model(x).square().mean()).backward()
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=generator) * scaler.get_scale()
            if step == 3 and p.dim() == 1 and scaler.is_enabled():
                grad[-1] = torch.inf  # on the last rank
            grad = grad.to(p.grad.dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else grad
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def unsharded(value):
    """A state without sharded tensors: gloo gathers neither 8-bit nor unsigned tensors."""
    if isinstance(value, dict):
        return {key: unsharded(each) for key, each in value.items()}
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
    """The tensor subclasses, other than torch's, among the local parts of a state."""
    if isinstance(value, dict):
        return set().union(*map(subclasses, value.values()))
    local = value.to_local() if hasattr(value, "to_local") else value
    return {type(local)} - {torch.Tensor, nn.Parameter} if isinstance(local, torch.Tensor) else set()


def leg(name, world, first, folder):
    """Two steps after those saved before, and the complete state after them."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    trained = model, optimizer, scaler = built(name, world, 5 + first)  # the loaded seed replaces this one
    if first:
        saved = states(model, optimizer) | {"scaler": scaler}
        checkpoint.load(saved, checkpoint_id=f"{folder}/{name}-{first}")
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    train_steps(trained, first, first + 2)
    now = states(model, optimizer)
    assert not subclasses(now | {"scaler": scaler.state_dict()})
    if world:
        checkpoint.save(now | {"scaler": scaler}, checkpoint_id=f"{folder}/{name}-{first + 2}")
    return unsharded(now | {"scaler": scaler.state_dict()})


def legs(rank, folder, first):
    return {name: leg(name, dist.get_world_size(), int(first), folder) for name in NAMES}


def error_of_fishman(rank):
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
def test_a_run_resumed_on_other_numbers_of_ranks_equals_one_process(runs, name):
    """Weights, masters, moments, the loss scale and skipped steps, scaling states, and the seeds of stochastic
    rounding."""
    trained = built(name, 0)
    for number, ranks in enumerate(runs):
        train_steps(trained, 2 * number, 2 * number + 2)
        expected = states(*trained[:2]) | {"scaler": trained[2].state_dict()}
        for rank in ranks:
            assert_same(rank[name], expected)
    moved = [not torch.equal(model_of(name).state_dict()[key], value) for key, value in expected["model"].items()]
    assert all(moved)


def test_sharding_a_moment_with_one_scale_raises(tmp_path):
    for said in on_ranks(error_of_fishman, tmp_path):
        assert "float8_e4m3 (current, whole tensor), which needs the whole tensor, and no rank has it" in said
