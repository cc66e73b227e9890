"""What a running setup loses: the updates of its steps that were rounded away, its audit, and what mends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

import torch
from torch import nn

from halfstep.auditing.audit import audit
from halfstep.auditing.report import COLUMNS, SCHEMA, Audit, folded
from halfstep.auditing.setup import Setup, kept_as, name_of, set_up
from halfstep.auditing.watch import Moved, Watch
from halfstep.bits.sentences import percent
from halfstep.errors import OptimizerError, RunError
from halfstep.optim import rule_of
from halfstep.recipe import get_recipe


LOST = 0.01
"""The share of lost updates from which on a setup is said to lose them: float32 itself rounds some away."""


@dataclass(frozen=True)
class Updates:
    """Of one step's updates that were looked at, those of values in one dtype that are kept in one way."""

    dtype: str
    kept: str
    """"alone", in the weight itself, rounded to nearest; "stochastic", the same by chance; "master", beside it."""
    parameters: int
    """Of the whole model, so kept."""
    step: int
    rate: float
    peak: float
    """The highest rate of a schedule of torch's; `rate` where there is none."""
    looked: int
    lost: int
    """Neither the weight moved nor a master."""
    roles: dict[str, float]
    """The share that was lost, by what weights are for: embedding, mlp, norm ..."""

    @property
    def share(self) -> float:
        """The share that was lost."""
        return self.lost / self.looked if self.looked else 0.0

    @property
    def harmful(self) -> bool:
        """Whether so many are lost: by chance as many arrive as are too many elsewhere."""
        return self.kept != "stochastic" and self.share >= LOST

    def __str__(self) -> str:
        least = f"; a schedule goes up to {self.peak:g}" if self.peak > self.rate else ""
        at = f"lr = {self.rate:g} (step {self.step:,}; {self.looked:,} looked at{least})"
        held = f"{self.parameters:,} parameters in {self.dtype}"
        lost = percent(self.share) if self.lost else "none"
        if not self.looked:
            return f"No update to look at, {held}: no value is finite with a gradient other than zero."
        if self.kept == "stochastic":
            return f"Your updates arrive, {held}, rounded stochastically: {lost} moved nothing at {at}, by chance."
        held += _BESIDE[self.kept, self.dtype == "float32"]
        if not self.harmful:
            return f"Your updates arrive, {held}: {lost} of them were lost at {at}."
        roles = ", ".join(f"{role} {percent(share)}" for role, share in self.roles.items())
        return f"Your updates are being lost: {lost} of them at {at}, {held}. By role: {roles}."


_BESIDE = {
    ("alone", False): " without master weights",
    ("alone", True): "",
    ("master", False): " beside master weights",
    ("master", True): " beside master weights",
}


@dataclass(frozen=True)
class Running:
    """A running setup: what became of its updates, what it keeps, and what mends it. `print(report)` shows it."""

    updates: tuple[Updates, ...]
    audit: Audit
    mend: Mend | None
    """None where nothing is lost."""

    @property
    def loses(self) -> bool:
        """Whether updates are being lost."""
        return any(one.harmful for one in self.updates)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        updates = [asdict(one) | {"share": one.share} for one in self.updates]
        made = None if self.mend is None else asdict(self.mend)
        return {"schema": SCHEMA, "loses": self.loses, "updates": updates, "mend": made, "audit": self.audit.to_dict()}

    def __str__(self) -> str:
        said = [fill(str(one), COLUMNS, subsequent_indent="  ", break_on_hyphens=False) for one in self.updates]
        return "\n".join([*said, *([] if self.mend is None else ["", str(self.mend)]), "", str(self.audit)])


def running(watch: Watch) -> tuple[Running, ...]:
    """A report of each model that a watch has seen optimizers step on.

    Raises:
        RunError: none stepped; or none of what they step on is a parameter of a module.
    """
    if not watch.steps:
        raise RunError(
            "no optimizer of torch's took a step, so there are no updates to look at; expected a program that trains: "
            "torch.optim.Optimizer or a subclass, stepped in this very process (under torchrun and accelerate, audit "
            "each process: torchrun -m halfstep audit train.py)"
        )
    if not watch.setups:
        names = ", ".join(dict.fromkeys(type(one).__name__ for one in watch.homeless))
        raise RunError(
            f"what {names} steps on is no parameter of a module in memory: it keeps copies of its own, flat or cut, as "
            "DeepSpeed's and Megatron's do; expected the model's own parameters. Audit them in their script, "
            "halfstep.audit(model, optimizer)"
        )
    return tuple(_report(model, optimizers, watch) for model, optimizers in watch.setups)


def _report(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], watch: Watch) -> Running:
    setup, report = set_up(model, *optimizers), audit(model, optimizers)
    found = tuple(_updates(setup, watch))
    lost = [one for one in found if one.harmful]
    made = mend(report, optimizers, [one.dtype for one in lost], watch.trainer) if lost else None
    return Running(found, report, made)


def _updates(setup: Setup, watch: Watch) -> Iterator[Updates]:
    """By how values are kept, the narrow ones first."""
    sets: dict[tuple[str, str], list[str]] = {}
    for name, parameter in setup.trained.items():
        taker = setup.by_hand.get(name, parameter)
        if taker in watch.moved:
            own = "master" if name in setup.masters and name not in setup.by_hand else "alone"
            how = "stochastic" if name in setup.stochastic and parameter.dtype == torch.bfloat16 else own
            sets.setdefault((name_of(kept_as(taker)), how), []).append(name)
    for (dtype, how), names in sorted(sets.items(), key=lambda pair: pair[0][0] == "float32"):
        moved = {name: watch.moved[setup.by_hand.get(name, setup.trained[name])] for name in names}
        yield _added(dtype, how, setup, moved.items())


def _added(dtype: str, how: str, setup: Setup, moved: Iterable[tuple[str, Moved]]) -> Updates:
    looked, lost = Counter[str](), Counter[str]()
    parameters, step, rate, peak = 0, 0, 0.0, 0.0
    for name, one in moved:
        role = setup.roles[name]
        looked[role] += int(one.wanted)
        lost[role] += int(one.lost)
        parameters += setup.trained[name].numel()
        step, rate, peak = max(step, one.step), max(rate, one.rate), max(peak, one.highest)
    shares = {role: lost[role] / count for role, count in looked.items() if count}
    return Updates(dtype, how, parameters, step, rate, peak, looked.total(), lost.total(), shares)


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
        return [folded(text)]

    def _mended(self) -> list[str]:
        if not self.recipes:
            return [folded(_float32(self.dtype))]
        first, *others = self.recipes.items()
        beside = "".join(f'; recipe="{name}" takes {size:.3g}' for name, size in others)
        when = "once the optimizer is made, " if self.lines[0] == "import halfstep" else ""
        head = f"Two lines mend it, {when}at {first[1]:.3g} bytes a parameter in all (now {self.now:.3g}{beside}):"
        return [folded(head), *(f"    {line}" for line in self.lines), folded(_float32(self.dtype))]


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
