"""What mends a setup that loses updates: the lines to change, their bytes a parameter, and what the loss costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

import torch

from halfstep.auditing.report import COLUMNS, Audit
from halfstep.errors import OptimizerError
from halfstep.optim.rules import rule_of
from halfstep.recipe import get_recipe


MEASURED = {"bfloat16": {1e-5: 0.14, 1e-4: 0.83}, "float16": {1e-5: 0.65, 1e-4: 0.98}}
"""By dtype and learning rate, the share of fp32's improvement that fine-tuning without masters reached: the recipes
`bf16-nomaster` and `fp16-nomaster` of benchmarks/results/which_bf16_finetune.json."""

_RECIPES = {"bfloat16": ("bf16-6byte", "bf16-master"), "float16": ("fp16-master",)}
_CURE = {"bfloat16": "stochastic rounding or master weights", "float16": "master weights"}
_MIXED = 16
"""Bytes of float32 weights, gradients and Adam's two moments."""


@dataclass(frozen=True)
class Mend:
    """Lines that mend a setup."""

    dtype: str
    now: float
    """Bytes a parameter, as audited."""
    lines: tuple[str, ...]
    recipes: dict[str, float]
    """Bytes a parameter by recipe; the first is the one in `lines`."""

    def __str__(self) -> str:
        return "\n".join([*self._measured(), *self._mended()])

    def _measured(self) -> list[str]:
        shares = MEASURED.get(self.dtype)
        if shares is None:
            return []
        reached = " and ".join(f"{share:.0%} at {rate:g}" for rate, share in shares.items())
        text = (
            f"What that costs: fine-tuned so, a small GPT reached {reached} of what float32 gains; with "
            f"{_CURE[self.dtype]} 99% or more (three seeds, docs/which_bf16.md)."
        )
        return [_wrapped(text)]

    def _mended(self) -> list[str]:
        if not self.recipes:
            return [_wrapped(_float32(self.dtype))]
        first, *others = self.recipes.items()
        beside = "".join(f'; recipe="{name}" takes {size:.3g}' for name, size in others)
        when = "once the optimizer is made, " if self.lines[0] == "import halfstep" else ""
        head = f"Two lines mend it, {when}at {first[1]:.3g} bytes a parameter in all (now {self.now:.3g}{beside}):"
        return [_wrapped(head), *(f"    {line}" for line in self.lines), _wrapped(_float32(self.dtype))]


def _wrapped(text: str) -> str:
    return fill(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _float32(dtype: str) -> str:
    if dtype == "float32":
        return "Raise the learning rate: float32 itself rounds such updates away."
    return (
        f"Without halfstep: keep the weights in float32 (from_pretrained(..., dtype=torch.float32)) and compute in "
        f"{dtype} under torch.autocast (Trainer's bf16=True or fp16=True), {_MIXED} bytes with Adam."
    )


def mend(
    report: Audit, optimizers: Sequence[torch.optim.Optimizer], dtypes: Sequence[str], trainer: type | None = None
) -> Mend:
    """What mends a setup that loses updates of values in these dtypes; `trainer` is transformers' class, if any."""
    dtype = next((one for one in dtypes if one in _RECIPES), dtypes[0])
    recipes = {}
    if dtype in _RECIPES and len(optimizers) == 1 and (moments := _moments(optimizers[0])) is not None:
        recipes = {name: get_recipe(name).bytes_per_parameter(moments).total for name in _RECIPES[dtype]}
    lines = tuple(_lines(next(iter(recipes)), trainer)) if recipes else ()
    return Mend(dtype, report.nbytes / (report.trained or 1), lines, recipes)


def _moments(optimizer: torch.optim.Optimizer) -> tuple[str, ...] | None:
    """The moments that halfstep would keep for it; None where it has no counterpart."""
    try:
        return rule_of(optimizer).moments(optimizer.param_groups[0])
    except OptimizerError:
        return None


def _lines(recipe: str, trainer: type | None) -> list[str]:
    if trainer is None:
        scale = get_recipe(recipe).loss_scale
        scaled = scale is not None and scale.scales
        made = "model, optimizer, scaler" if scaled else "model, optimizer, _"
        after = "  # step by the scaler: docs/start.md" if scaled else ""
        return ["import halfstep", f'{made} = halfstep.prepare(model, optimizer, recipe="{recipe}"){after}']
    if trainer.__name__ == "Trainer":
        return [
            "from halfstep.integrations.transformers import HalfstepTrainer as Trainer",
            f'trainer = Trainer(..., recipe="{recipe}")  # and neither bf16=True nor fp16=True',
        ]
    return [
        "from halfstep.integrations.transformers import HalfstepMixin",
        f'class Tuner(HalfstepMixin, {trainer.__name__}): ...  # Tuner(..., recipe="{recipe}"), no bf16=True',
    ]
