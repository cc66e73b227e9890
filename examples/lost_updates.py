"""Why bf16 weights need a master copy or stochastic rounding: subtract 2^-12 from 1.0, 4096 times."""

import argparse

import torch
from torch import nn

import halfstep


def main() -> dict[str, float]:
    """Print the final weight under each recipe; the exact result is 0."""
    ends = {}
    for recipe in ("fp32", "bf16-master", "bf16-stochastic", "bf16-nomaster", "fp16-pure"):
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, _ = halfstep.prepare(model, optimizer, recipe, generator=0)
        model.weight.grad = torch.full_like(model.weight, 2.0**-12)
        for _ in range(4096):
            optimizer.step()
        ends[recipe] = model.weight.float().mean().item()
        print(f"{recipe:16} {ends[recipe]:.4f}")
    return ends


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
