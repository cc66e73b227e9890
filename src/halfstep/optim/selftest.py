"""The one-pass optimizer step against the reference, bit for bit: a part of `halfstep doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from halfstep.kernels.selftest import SIZES, Case, Outcome, hard, outcome
from halfstep.optim.conversion import convert
from halfstep.optim.rules.base import never
from halfstep.recipe import DTYPES, Recipe, get_recipe


_RECIPES = (
    "fp32", "bf16-master", "bf16-stochastic", "bf16-split", "bf16-kahan", "bf16-collage-plus", "bf16-7byte",
    "fp16-pure",
)  # fmt: skip


def outcomes() -> Iterator[Outcome]:
    """Two steps of AdamW by the kernel and by the rule, for every way of keeping weights and moments."""
    for name in _RECIPES:
        yield outcome("adam", name, _steps)


def _steps(name: str) -> Iterator[Case]:
    recipe = get_recipe(name)
    for size in SIZES:
        weight = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float32, device="cpu")
        ordinary = torch.randn(
            size, generator=torch.Generator().manual_seed(size + 1), dtype=torch.float32, device="cpu"
        )
        for grads, what in (([ordinary, ordinary * 1e-3], "ordinary"), ([hard(size), ordinary], "hard")):
            expected, found = (_stepped(recipe, weight, grads, fused) for fused in (False, True))
            for key, tensor in expected.items():
                yield (
                    tensor,
                    found[key],
                    torch.empty(0, dtype=torch.float32, device="cpu"),
                    f"{size} elements, {what} gradients, {key}",
                )


def _stepped(recipe: Recipe, weight: Tensor, grads: list[Tensor], fused: bool) -> dict[str, Tensor]:
    """The weight and the optimizer's states after those gradients."""
    parameter = torch.nn.Parameter(weight.to(DTYPES[recipe.weights], copy=True))
    masters = {parameter: weight.clone()} if recipe.master else {}
    optimizer = convert(torch.optim.AdamW([parameter], lr=1e-2), recipe, masters, 7)
    if not fused:
        optimizer.rule = replace(optimizer.rule, fused=never)
    for grad in grads:
        parameter.grad = grad.to(parameter.dtype)
        optimizer.step()
        parameter.data[::7] = 0.0  # as a mask would: what is kept beside them follows
    states = {key: state for key, state in optimizer.state[parameter].items() if isinstance(state, Tensor)}
    return {"weight": parameter.detach(), **states}
