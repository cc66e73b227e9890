"""Whether the gate and up projections of a gated MLP align under weight decay: a small Llama on text.

python benchmarks/alignment.py [--keep] [--steps N]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.environment import environment
from halfstep.lab.models.llama import Llama
from halfstep.lab.task import VOCABULARY
from halfstep.lab.tasks import experiment_for, get_task
from harness import keep


DECAYS = (0.0, 0.1, 1.0)


def train(decay: float, steps: int, lr: float = 3e-3) -> list[dict[str, float]]:
    """Train in float32 with AdamW, with weight decay on matrices only; the results of `look` at five evenly spaced
    steps."""
    task = get_task("lm").open(experiment_for("lm", recipes=("fp32",), batch=16, context=32))
    torch.manual_seed(0)
    model = Llama(VOCABULARY, 32, layers=2, width=64, heads=2)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    inputs: list[Tensor] = []
    for block in model.layers:
        block.mlp.down_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    found = []
    for step in range(1, steps + 1):
        batch = task.batch(0, step)
        inputs.clear()
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % (steps // 5) == 0:
            found.append({"step": step, "loss": loss.item(), **cosine_statistics(model, inputs)})
            print(decay, found[-1], flush=True)
    return found


@torch.no_grad()
def cosine_statistics(model: Any, inputs: list[Tensor]) -> dict[str, float]:
    """Statistics of |cosine| between the rows of the gate and up projections, over the channels that contribute; and
    the amax of the down projections' inputs."""
    cosines, amaxes, peaks = [], [], []
    for block, hidden in zip(model.layers, inputs, strict=True):
        mlp, rows = block.mlp, hidden.flatten(0, -2)
        size = rows.square().mean(0).sqrt() * mlp.down_proj.weight.norm(dim=0)
        cosine = F.cosine_similarity(mlp.gate_proj.weight, mlp.up_proj.weight).abs()
        cosines.append(cosine[size > 0.01 * size.max()])
        amaxes.append(rows.abs().max())
        peaks.append(rows.abs().max() / rows.square().mean().sqrt())
    every = torch.cat(cosines)
    return {
        "channels": len(every),
        "mean": float(every.mean()),
        "max": float(every.max()),
        "above_0.9": float((every > 0.9).float().mean()),
        "above_0.5": float((every > 0.5).float().mean()),
        "amax": float(max(amaxes)),
        "amax_over_rms": float(max(peaks)),
    }


def main() -> None:
    """Run, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    rows = {str(decay): train(decay, arguments.steps) for decay in DECAYS}
    if arguments.keep:
        keep("alignment", {"machine": environment(), "steps": arguments.steps, "runs": rows})


if __name__ == "__main__":
    main()
