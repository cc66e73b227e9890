"""A run that goes on after a rank was killed: torchrun --nproc-per-node 2 --max-restarts 5 examples/elastic.py RUN

torchrun starts all ranks again, and they go on from the last checkpoint in the folder RUN, bit for bit: what a step
takes in depends on its number and the rank alone, and all that a recipe keeps is in three state dicts.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.recipe import FP8


def start() -> None:
    """Form the group of this attempt. torchrun hands it the store of the one before, with the addresses of ranks that
    are gone, which gloo would try to reach; a prefix hides them."""
    store, rank, world = next(dist.rendezvous("env://"))
    attempt = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world)


def batch(step: int, rank: int) -> Tensor:
    """The rows of a rank in a step."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step * dist.get_world_size() + rank))


def save(file: Path, step: int, parts: list) -> None:
    """Write a checkpoint whole or not at all: the old one is there until the new one is."""
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save([step, *(part.state_dict() for part in parts)], file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)
    dist.barrier()


def load(file: Path, parts: list) -> int:
    """Load it, if there is one; how many steps were made."""
    if not file.exists():
        return 0
    step, *states = torch.load(file)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    return step


def train(
    folder: Path, recipe: str, steps: int = 20, every: int = 4, rows: Callable[[int, int], Tensor] = batch
) -> float:
    """Train from the last checkpoint on; the last loss of this rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    ddp = DistributedDataParallel(model)
    halfstep.distributed.compress(ddp, FP8, scaler=scaler)  # which sums in rank order, whatever lies in a bucket
    parts, file, loss = [model, optimizer, scaler], folder / "checkpoint.pt", torch.zeros(())
    for step in range(load(file, parts), steps):
        x = rows(step, dist.get_rank())
        loss = F.mse_loss(ddp(x), x.roll(1, 1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if (step + 1) % every == 0 or step + 1 == steps:
            save(file, step + 1, parts)
    return float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on several ranks, from the last checkpoint on.")
    parser.add_argument("folder", type=Path, help="where the checkpoint is, or will be")
    parser.add_argument("--recipe", default="bf16-stochastic")
    given = parser.parse_args()
    start()
    found = train(given.folder, given.recipe)
    if dist.get_rank() == 0:
        print(f"{given.recipe}: loss {found:.4f}")
    dist.destroy_process_group()
