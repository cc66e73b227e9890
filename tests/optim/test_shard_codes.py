"""Coded moments under fully_shard equal one process's bit for bit; saved on 2 ranks, they load on 1 and 4."""

from dataclasses import replace

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed import checkpoint

from halfstep.optim import AdamW8bit, Combined, LowBitAdamW, convert
from halfstep.recipe import get_recipe, get_storage
from ranks import on_ranks
from tiny import assert_same


pytestmark = pytest.mark.slow
COAT = replace(get_recipe("coat").moment("exp_avg"), smallest=4096)
KINDS = {
    "AdamW8bit": lambda ps: AdamW8bit(ps, lr=0.01),
    "COAT's groups": lambda ps: LowBitAdamW(ps, lr=0.01, moments=(("*", COAT),)),
    "mxfp8": lambda ps: LowBitAdamW(
        ps, lr=0.01, moments=(("exp_avg", get_storage("mxfp8_e4m3", smallest=4096)), ("exp_avg_sq", "fp32"))
    ),
}


def muon(parameters):
    """Muon, which orthogonalizes whole matrices and stores momenta of shards as codes."""
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.dim() == 2) is those] for those in (True, False))
    both = Combined(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01))
    return convert(both, get_recipe("adamw-8bit"), {})


if hasattr(torch.optim, "Muon"):
    KINDS["Muon's momentum"] = muon


def trained(kind, world=0, folder=None, saves=False):
    """The weights and states after six steps. The state after three is saved to the folder, or loaded from it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 52))
    if world:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = KINDS[kind](model.parameters())

    def steps(first):
        for step in range(first, first + 3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                grad = torch.randn(p.shape, generator=generator)
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if world else grad
            optimizer.step()

    if saves or not world:
        steps(0)
    if world:
        weights, states = get_state_dict(model, optimizer)
        files = {"model": weights, "optimizer": states}
        if saves:
            checkpoint.save(files, checkpoint_id=folder)
        else:
            checkpoint.load(files, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=files["model"], optim_state_dict=files["optimizer"])
    steps(3)
    found = list(model.parameters())
    for state in map(optimizer.state.__getitem__, model.parameters()):
        name = "exp_avg" if "exp_avg" in state else "momentum_buffer"
        found += [state[name], *([state[f"{name}_scale"]] if f"{name}_scale" in state else [])]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for t in found]


def results(rank, folder, does):
    return {kind: trained(kind, dist.get_world_size(), f"{folder}/{kind}", does == "saves") for kind in KINDS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    saved, found = tmp_path_factory.mktemp("saved"), {}
    for world, does in ((2, "saves"), (1, "loads"), (4, "loads")):
        found[world] = on_ranks(results, tmp_path_factory.mktemp("ranks"), saved, does, world=world)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_and_resharded_checkpoints_equal_one_process(runs, world, kind):
    expected = trained(kind)
    assert torch.uint8 in {t.dtype for t in expected} or torch.float8_e4m3fn in {t.dtype for t in expected}
    for rank in runs[world]:
        assert_same(rank[kind], expected)
