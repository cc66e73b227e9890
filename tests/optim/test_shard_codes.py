"""Moments that are codes under fully_shard: bit for bit one process's; saved on 2 ranks, loaded on 1 and 4."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from halfstep.optim import AdamW8bit, LowBitAdamW
from halfstep.recipe import get_recipe, get_storage
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
RANK = """
import sys, torch, torch.distributed as dist
rank, world, folder, tests, saves = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] == "saves"
sys.path[:0] = [tests, f'{tests}/optim']
torch.set_num_threads(1)
from test_shard_codes import KINDS, trained
dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world)
torch.save({kind: trained(kind, world, f"{folder}/{kind}", saves) for kind in KINDS}, f"{folder}/{world}-{rank}.pt")
dist.destroy_process_group()
"""


def trained(kind, world=0, folder=None, saves=False):
    """Six steps. After three the state is written to the folder, or the steps begin with what is read from there."""
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
    for state in optimizer.state.values():
        found += [state["exp_avg"], *([state["exp_avg_scale"]] if "exp_avg_scale" in state else [])]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for t in found]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    tests = str(Path(__file__).parent.parent)
    for world, does in ((2, "saves"), (1, "loads"), (4, "loads")):
        command = [sys.executable, "-W", "ignore", "-c", RANK]
        arguments = [[str(rank), str(world), str(folder), tests, does] for rank in range(world)]
        started = [subprocess.Popen([*command, *given]) for given in arguments]
        assert [process.wait(timeout=300) for process in started] == [0] * world
    return {world: [torch.load(folder / f"{world}-{rank}.pt") for rank in range(world)] for world in (1, 2, 4)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_and_what_another_number_of_ranks_saved(runs, world, kind):
    expected = trained(kind)
    assert torch.uint8 in {t.dtype for t in expected} or torch.float8_e4m3fn in {t.dtype for t in expected}
    for rank in runs[world]:
        assert_same(rank[kind], expected)
