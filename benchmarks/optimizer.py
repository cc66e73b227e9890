"""What does an optimizer step cost in few bits? Against torch's fused AdamW over the same number of parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import halfstep
from harness import Contender, race, report


SIZE, ROUNDS = 1 << 24, 15
RECIPES = {
    "fp32": None, "bf16-stochastic": 2.0, "bf16-nomaster": None, "bf16-master": None, "bf16-pure": None,
    "bf16-split": 1.5, "bf16-kahan": 1.5, "bf16-collage-light": 1.5, "bf16-collage-plus": 1.5,
}  # fmt: skip


class Weights(nn.Module):
    """One large parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))


def stepping(recipe: str | None) -> Callable[[], object]:
    """The step of torch's fused AdamW (None) or of a recipe's optimizer."""
    model = Weights()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=recipe is None)
    if recipe is not None:
        _, optimizer, _ = halfstep.prepare(model, optimizer, recipe)
    model.weight.grad = torch.randn(SIZE).to(model.weight.dtype)
    return optimizer.step


def main() -> None:
    """Time one step of each, interleaved."""
    torch.manual_seed(0)
    contenders = [Contender("torch fused AdamW, fp32", stepping(None))]
    contenders += [Contender(name, stepping(name), contenders[0].name, bar) for name, bar in RECIPES.items()]
    report("optimizer", f"an AdamW step over {SIZE / 2**20:.0f}Mi parameters", race(contenders, ROUNDS), ROUNDS)


if __name__ == "__main__":
    main()
