"""Shards of a weight on two and three ranks equal the unsharded weight; ranks are simulated in one process."""

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep
from tiny import assert_same


ROWS = 5  # not divisible by two or three


def shards_after_steps(name, shard=lambda tensor: tensor, group=None, seed=5):
    """A weight and its states after three steps, of the shard that `shard` cuts out."""
    model = nn.Linear(4, ROWS, bias=False)
    nn.init.constant_(model.weight, 0.7)
    halfstep.apply(model, name)
    model.weight = nn.Parameter(shard(model.weight.detach()))
    given = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer, _ = halfstep.optimize(model, given, generator=seed, process_group=group)
    for step in range(3):
        grad = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step))
        model.weight.grad = shard(grad.to(model.weight.dtype))
        optimizer.step()
    found = {"weight": model.weight.detach(), **optimizer.state[model.weight]}
    return {key: t.to_local() if hasattr(t, "to_local") else t for key, t in found.items() if key != "step"}


@pytest.mark.parametrize("name", ["bf16-stochastic", "bf16-master", "bf16-collage-plus"])
def test_shards_equal_the_unsharded_weight(name):
    whole = shards_after_steps(name)
    assert torch.equal(whole["weight"], shards_after_steps(name, seed=6)["weight"]) == (name != "bf16-stochastic")
    for world in (2, 3):
        for rank in range(world):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            try:
                mesh, alone = init_device_mesh("cpu", (world,)), dist.new_group([rank])

                def part(tensor, mesh=mesh):
                    own = tensor.chunk(mesh.size())[mesh.get_local_rank()]
                    return DTensor.from_local(own, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride())

                found = shards_after_steps(name, part, alone)
            finally:
                dist.destroy_process_group()
            assert_same(found, {key: value.chunk(world)[rank] for key, value in whole.items()})
