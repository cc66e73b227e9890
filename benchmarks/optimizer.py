"""What an optimizer step costs in few bits, against torch's fused AdamW and 8-bit AdamW of others, in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import halfstep
from halfstep import formats
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import Recipe, Storage, get_recipe, get_storage
from harness import Contender, race, report


TENSORS, SHAPE, ROUNDS = 8, (2048, 1024), 15
RECIPES = {
    "fp32": None, "bf16-stochastic": 2.0, "bf16-nomaster": None, "bf16-master": None, "bf16-pure": None,
    "bf16-split": 1.5, "bf16-kahan": 1.5, "bf16-collage-light": 1.5, "bf16-collage-plus": 1.5, "adamw-8bit": None,
}  # fmt: skip


class Weights(nn.Module):
    """A few large parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(SHAPE)) for _ in range(TENSORS)])

    def with_gradients(self) -> Weights:
        for weight in self.weights:
            weight.grad = torch.randn(SHAPE).to(weight.dtype)
        return self


def blocks(format: str) -> Storage:
    """A format in blocks of 256."""
    return get_storage(Quantizer(formats.get(format), scales=Scales(Tile(1, 256), get_scaling("absmax"))), flat=True)


def of_tensor(format: str, rule: str) -> Storage:
    """A format with one scale a tensor."""
    return get_storage(Quantizer(formats.get(format), scales=Scales(TENSOR, get_scaling(rule))))


def kept_as(first: Storage, second: Storage) -> Recipe:
    """fp32 weights with the moments kept so."""
    return replace(get_recipe("fp32"), name="moments", moments=(("exp_avg", first), ("exp_avg_sq", second)))


def coat_moments() -> Recipe:
    """fp32 weights with the moments of the recipe `coat`."""
    return replace(get_recipe("fp32"), name="moments", moments=get_recipe("coat").moments)


def stepping(recipe: str | Recipe | None) -> Callable[[], object]:
    """The step of torch's fused AdamW (None) or of a recipe's optimizer."""
    model = Weights()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=recipe is None)
    if recipe is not None:
        _, optimizer, _ = halfstep.prepare(model, optimizer, recipe)
    model.with_gradients()
    return optimizer.step


def theirs(library: str, name: str) -> Callable[[], object]:
    """The step of another library's AdamW; an error where it is not installed comes with the first call."""
    steps: list[Callable[[], object]] = []

    def step() -> object:
        if not steps:
            module = __import__(library, fromlist=["optim"]).optim
            steps.append(getattr(module, name)(Weights().with_gradients().parameters(), lr=1e-4).step)
        return steps[0]()

    return step


def main() -> None:
    """Time one step of each, interleaved."""
    torch.manual_seed(0)
    fused, bits, fp8 = "torch fused AdamW, fp32", "bitsandbytes AdamW8bit", "torchao AdamWFp8"
    contenders = [Contender(fused, stepping(None))]
    contenders += [
        Contender(bits, theirs("bitsandbytes", "AdamW8bit"), fused, is_peer=True),
        Contender(fp8, theirs("torchao", "AdamWFp8"), fused, is_peer=True),
        Contender("torchao AdamW8bit", theirs("torchao", "AdamW8bit"), fused, is_peer=True),
    ]
    contenders += [Contender(name, stepping(name), fused, bar) for name, bar in RECIPES.items()]
    eight, moments = stepping("adamw-8bit"), stepping(kept_as(blocks("e4m3fn"), blocks("e5m2")))
    fishman = kept_as(of_tensor("e4m3fn", "current"), of_tensor("e5m2", "current"))
    fp8lm = kept_as(of_tensor("e4m3fn", "rceil"), of_tensor("fp16", "rceil"))
    contenders += [
        Contender("E4M3 and E5M2 moments", moments, fused, 1.15),
        Contender("E4M3 and E5M2 moments, to torchao", moments, fp8, 0.25),
        Contender("adamw-8bit, to bitsandbytes", eight, bits, 1 / 6),
        Contender("E4M3 twice, as torchao keeps them: fp8-adam", stepping("fp8-adam"), fused),
        Contender("E4M3 and E5M2, a scale a tensor: Fishman's", stepping(fishman), fused),
        Contender("E4M3 and scaled fp16: FP8-LM's", stepping(fp8lm), fused),
        Contender("E4M3 expanded in groups of 128: coat", stepping(coat_moments()), fused, 4.0),
    ]
    size = TENSORS * SHAPE[0] * SHAPE[1] / 2**20
    report(
        "optimizer",
        f"an AdamW step over {size:.0f}Mi parameters in {TENSORS} tensors",
        race(contenders, ROUNDS),
        ROUNDS,
    )


if __name__ == "__main__":
    main()
