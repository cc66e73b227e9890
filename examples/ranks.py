"""Train on several ranks with gradients sent in FP8: torchrun --nproc-per-node 2 examples/ranks.py ddp

With `own` the model is not wrapped, and one call reduces the gradients before each step: for recipes whose gradients
have another dtype than their weights (`--recipe bf16-megatron`). With `fsdp` weights are sharded, and gathered as the
codes to which products round them, where the recipe allows it (`--recipe fp8-block`).
"""

import argparse
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.recipe import FP8, OPERANDS


def main(how: str = "ddp", recipe: str = "bf16-mixed", steps: int = 20) -> list[float]:
    """The loss of each step, averaged over all ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if how == "fsdp":
        halfstep.apply(model, recipe)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer, scaler = halfstep.optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        halfstep.distributed.compress(model, replace(FP8, weights=OPERANDS))
    elif how == "tp":
        halfstep.apply(model, recipe)
        spread = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), spread)
        optimizer, scaler = halfstep.optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:
        model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
    called = model
    if how == "ddp":
        called = DistributedDataParallel(model)
        halfstep.distributed.compress(called, FP8, scaler=scaler)
    losses = []
    for step in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank()))
        loss = F.mse_loss(called(x), x.roll(1, 1))
        if how == "tp":  # its gradients are sums over the tokens of all ranks
            loss = loss / dist.get_world_size()
        scaler.scale(loss).backward()
        if how == "own":
            halfstep.distributed.reduce_gradients(model, FP8, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) if how == "tp" else float(mean) / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"{how}, {recipe}: loss {losses[0]:.4f} to {losses[-1]:.4f} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on several ranks, with gradients sent in FP8.")
    parser.add_argument("how", choices=["ddp", "own", "fsdp", "tp"], help="how ranks train together")
    parser.add_argument("--recipe", default="bf16-mixed")
    given = parser.parse_args()
    main(given.how, given.recipe)
