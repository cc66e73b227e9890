"""Train under FP8, store one byte per weight, save, load, and compute the same results."""

import argparse
import copy
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import halfstep


def build() -> nn.Module:
    """A small regression model."""
    return nn.Sequential(nn.Linear(1, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))


def main(recipe: str = "fp8-delayed", steps: int = 100) -> tuple[float, float]:
    """Returns the loss after training and the loss of the model that was quantized, saved and loaded."""
    torch.manual_seed(0)
    model = build()
    x = torch.linspace(-2, 2, 256)[:, None]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe)
    for _ in range(steps):
        scaler.scale(F.mse_loss(model(x), torch.sin(3 * x))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with torch.no_grad():
        trained = F.mse_loss(model.eval()(x), torch.sin(3 * x)).item()

    quantized = copy.deepcopy(model)
    print(halfstep.quantize_model(quantized, recipe))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file(quantized.state_dict(), file)
        print(f"{file.stat().st_size:,} bytes on disk; loss {trained:.5f}")
        again = build()
        halfstep.quantize_model(again, recipe)
        again.load_state_dict(load_file(file))
    return trained, F.mse_loss(again(x), torch.sin(3 * x)).item()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
