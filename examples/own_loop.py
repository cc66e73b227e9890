"""Your own model and loop under a recipe: three lines change."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import halfstep


def main(recipe: str = "bf16-stochastic", steps: int = 200) -> float:
    """Fit y = sin(3x) and return the last loss."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)  # 1

    for _ in range(steps):
        x = torch.rand(256, 1) * 4 - 2
        loss = F.mse_loss(model(x), torch.sin(3 * x))
        scaler.scale(loss).backward()  # 2
        scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        scaler.step(optimizer)  # 3
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    print(f"{recipe}: loss {loss.item():.5f}, weights in {next(model.parameters()).dtype}")
    return loss.item()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in halfstep.list_recipes():
        try:
            main(name)
        except halfstep.HalfstepError as error:  # fp16-pure fails, with the reason
            print(f"{name}: {error}")
