"""The time that `halfstep.cached_weights` saves on micro-batches in training and evaluation.

Eight micro-batches forward and backward, and eight forwards of an evaluation, with weights rounded once or for each,
and the same for torch's autocast and its cache of casts.

    python benchmarks/micro_batches.py [--keep]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

import halfstep
from harness import Contender, keeps, race, report


RECIPES = ("fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4", "coat")
MICRO, WIDTH, LAYERS, ROUNDS = 8, 512, 2, 11
ROWS = {"64 rows": 64, "16 rows": 16}


def model_of(layers: int = LAYERS) -> nn.Module:
    """A sequence of MLPs of 2.1 million weights each."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(layers)]
    return nn.Sequential(*parts)


def works(
    model: nn.Module, rows: int, around: Callable[[], AbstractContextManager[object]], each: bool
) -> dict[str, Callable[[], None]]:
    """Training and evaluation on MICRO micro-batches of `rows` rows, as functions. `each` enters `around` for every
    micro-batch instead of once."""
    batches = torch.randn(MICRO, rows, WIDTH)

    def forward(x: Tensor) -> Tensor:
        with around() if each else nullcontext():
            y: Tensor = model(x)
        return y

    def training() -> None:
        with nullcontext() if each else around():
            for x in batches:
                forward(x).square().mean().backward()
        model.zero_grad()

    def evaluation() -> None:
        model.eval()
        with torch.no_grad(), nullcontext() if each else around():
            for x in batches:
                forward(x)
        model.train()

    return {"training": training, "evaluation": evaluation}


def contenders() -> list[Contender]:
    """Each recipe with weights rounded once, compared with the same with weights rounded for each micro-batch."""
    found = []
    for size, rows in ROWS.items():
        made: dict[str, tuple[nn.Module, Callable[[], AbstractContextManager[object]]]] = {
            "torch.autocast": (model_of(), lambda: torch.autocast("cpu", dtype=torch.bfloat16))
        }
        for recipe in RECIPES:
            model = model_of()
            model, _, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
            made[recipe] = model, lambda model=model: halfstep.cached_weights(model)
        for name, (model, around) in made.items():
            separate = works(model, rows, around if name == "torch.autocast" else nullcontext, True)
            once = works(model, rows, around, False)
            for work in separate:
                base = f"{name}, {work}, {size}"
                found += [Contender(base, separate[work]), Contender(f"{base}: weights once", once[work], base, 1.0)]
    return found


def main() -> None:
    """Time all of them, interleaved."""
    kept = keeps(__doc__)
    rows = race(contenders(), ROUNDS)
    question = f"{MICRO} micro-batches of {LAYERS} MLPs of width {WIDTH}"
    report("micro_batches", question, rows, ROUNDS, kept)


if __name__ == "__main__":
    main()
