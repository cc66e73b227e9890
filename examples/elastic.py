"""A run that continues after a rank was killed: torchrun --nproc-per-node 2 --max-restarts 5 examples/elastic.py RUN

torchrun restarts all ranks, and they resume bit for bit from the last checkpoint in the folder RUN: the data of a step
depends only on its number and the rank, and the state of a recipe is in three state dicts.
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
    """Form the process group of this attempt. torchrun passes the store of the previous attempt, with addresses of
    ranks that no longer exist, to which gloo would try to connect; a prefix hides them."""
    store, rank, world = next(dist.rendezvous("env://"))
    attempt = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world)


def batch(step: int, rank: int) -> Tensor:
    """The rows of a rank in a step."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step * dist.get_world_size() + rank))


def save(file: Path, step: int, parts: list) -> None:
    """Write a checkpoint atomically: the old one stays until the new one is complete."""
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save([step, *(part.state_dict() for part in parts)], file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)
    dist.barrier()


def load(file: Path, parts: list) -> int:
    """Load the checkpoint, if there is one, and return the number of steps done."""
    if not file.exists():
        return 0
    step, *states = torch.load(file)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    return step


def train(
    folder: Path, recipe: str, steps: int = 20, every: int = 4, rows: Callable[[int, int], Tensor] = batch
) -> float:
    """Train from the last checkpoint on, and return the last loss of this rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    ddp = DistributedDataParallel(model)
    halfstep.distributed.compress(ddp, FP8, scaler=scaler)  # sums in rank order, whatever the buckets
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
