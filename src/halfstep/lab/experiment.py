"""What an experiment is, frozen data written into its run folder before anything runs; what its task tells reports."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from halfstep.errors import RunError, unknown


def list_tasks() -> list[str]:
    """The names of the tasks, read off their files: `halfstep compare --help` shows them without importing torch."""
    package = find_spec("halfstep.lab.tasks")
    return [info.name for info in iter_modules(package.submodule_search_locations if package else None)]


@dataclass(frozen=True)
class Metric:
    """The measure that a field reports, beside the loss."""

    name: str
    higher_is_better: bool
    best: float
    """What a perfect model gets."""
    form: str = "{:.4f}"
    """How a value is printed, as a format string."""
    judges: bool = False
    """Whether verdicts come from it: where the loss says little about how good the model is."""

    def show(self, value: float | None) -> str:
        """A value in words.

        >>> Metric("accuracy", True, 1.0, "{:.1%}").show(0.987)
        '98.7%'
        """
        return "-" if value is None else self.form.format(value)


@dataclass(frozen=True)
class Facts:
    """The part of a task that the run folder holds. The defaults here are those of folders older than tasks."""

    metric: Metric | None = None
    loss_unit: str = "nats"
    unit: str = "tokens"
    """What a batch is counted in."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The fields of an experiment that this task sets otherwise than `Experiment` does."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any] | None) -> Facts:
        """The facts that `to_dict` wrote; None gives those of a folder that has none.

        Raises:
            RunError: the data is of another kind: the file was edited.
        """
        if data is None:
            return cls()
        try:
            metric = data["metric"]
            return cls(**{**data, "metric": None if metric is None else Metric(**metric)})
        except (TypeError, KeyError) as error:
            raise RunError(f"experiment.json: 'task' is not what halfstep writes ({error}); it was edited") from error


_LATER: dict[str, Any] = {"optimizer": "adamw", "recipe_lr": {}, "sharpness": 0.0, "tensors": 0}
"""Fields that older experiments lack. Data leave them out at these values, so that older runs keep their names."""


@dataclass(frozen=True)
class Experiment:
    """One model on one task under several recipes, all else equal but for what `recipe_lr` says.

    A seed fixes the first weights and the order of the batches, for every recipe alike.
    """

    recipes: tuple[str, ...]
    task: str = "lm"
    """See `halfstep.lab.tasks`; its own defaults for the fields below are in `experiment_for(task, ...)`."""
    model: str = "gpt-tiny"
    data: str | None = None
    """A text file, a folder or a glob; None is the Python standard library's documentation and source."""
    steps: int = 400
    seeds: int = 3
    """Seeds a recipe is trained with."""
    baseline_seeds: int = 3
    """Seeds fp32 is trained with, where it takes part, if that is more."""
    margin: float = 0.01
    """What a recipe may lose before it degrades, relative to fp32."""
    batch: int = 16
    context: int = 64
    lr: float = 1e-3
    """The peak learning rate: reached after the warm-up, then a cosine towards zero."""
    recipe_lr: Mapping[str, float] = field(default_factory=dict)
    """By recipe, the peak learning rate of those that do not take `lr`."""
    optimizer: str = "adamw"
    """An update rule: see `halfstep.optim.update_rules()`."""
    warmup: int = 30
    betas: tuple[float, float] = (0.9, 0.95)
    """Where the optimizer has a momentum instead, it is the first."""
    weight_decay: float = 0.1
    """Of optimizers that decay the weights. Adam, NAdam, RMSprop and SGD add it to the gradient: without it."""
    clip: float = 1.0
    validations: int = 10
    """How many times the held-out loss is measured, the last time after the last step."""
    statistics: int = 5
    """How many steps are looked at closely: exponents, shares zeroed."""
    checkpoints: int = 10
    """How many times a run saves itself."""
    sharpness: float = 0.0
    """The box around the logits in which the loss's sharpness is written down at each step; 0 writes none."""
    tensors: int = 0
    """At how many steps each tensor's amax, saturated share and update are written down; 0 writes none."""

    def __post_init__(self) -> None:
        for name in (
            "steps", "seeds", "baseline_seeds", "batch", "context", "lr", "validations", "checkpoints", "statistics",
            "margin",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise RunError(f"{name} = {getattr(self, name)} given; expected a positive number")
        if not 0 <= self.sharpness < math.inf:
            raise RunError(f"sharpness = {self.sharpness} given; expected a box of 0 (none) or more, such as 5e-4")
        if self.tensors < 0:
            raise RunError(f"tensors = {self.tensors} given; expected 0 (none) or a number of steps")
        if not self.recipes:
            raise RunError("no recipe given; name at least one, or see `halfstep recipes`")
        if len(set(self.recipes)) != len(self.recipes):
            raise RunError(f"a recipe is named twice in {', '.join(self.recipes)}; name each once")
        for recipe, rate in self.recipe_lr.items():
            if not 0 < rate < math.inf:
                raise RunError(f"a learning rate of {rate} given for recipe {recipe!r}; expected a positive number")

    def alone(self, recipe: str) -> Experiment:
        """The experiment as one recipe trains in it: with its own learning rate, where it has one."""
        return replace(self, recipes=(recipe,), lr=self.recipe_lr.get(recipe, self.lr), recipe_lr={})

    def named(self, names: Mapping[str, str]) -> Experiment:
        """The same, its recipes called by their names.

        Args:
            names: by what was asked for (which may be a file), the recipe's name.

        Raises:
            RunError: a learning rate is given twice, or for a recipe that takes no part.
        """
        rates: dict[str, float] = {}
        for asked, rate in self.recipe_lr.items():
            name = names.get(asked, asked)
            if name not in names.values():
                raise RunError(
                    f"a learning rate of its own was given for a recipe that takes no part: "
                    f"{unknown('recipe', asked, names.values())}"
                )
            if name in rates:
                raise RunError(f"recipe {name!r} was given two learning rates, {rates[name]} and {rate}; give one")
            rates[name] = rate
        return replace(self, recipes=tuple(names.values()), recipe_lr=rates)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, from 1: a linear warm-up, then a cosine that is zero one step after the last."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        progress = (step - self.warmup) / (self.steps + 1 - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * progress))

    def due(self, step: int, times: int) -> bool:
        """Whether something done `times` times, evenly and last after the last step, is due after `step`."""
        return step * times // self.steps > (step - 1) * times // self.steps

    def runs(self) -> list[tuple[str, int]]:
        """Every (recipe, seed), first seeds first, so that a first comparison is there early."""
        counts = {r: max(self.seeds, self.baseline_seeds) if r == "fp32" else self.seeds for r in self.recipes}
        return [(r, s) for s in range(max(counts.values())) for r in self.recipes if s < counts[r]]

    def baselines(self) -> range:
        """The seeds of fp32 that are looked for where it takes no part: an earlier experiment may have trained them."""
        return range(max(Experiment.baseline_seeds, self.baseline_seeds, self.seeds))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {name: value for name, value in data.items() if name not in _LATER or value != _LATER[name]}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Experiment:
        """What `to_dict` wrote: JSON has lists for tuples."""
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return cls(**given)

    def key(self, *more: object) -> str:
        """A name for everything that fixes a run's numbers, whatever the recipes and the number of seeds."""
        others = ("recipes", "seeds", "baseline_seeds", "margin", "checkpoints")
        data = {name: value for name, value in self.to_dict().items() if name not in others}
        return hashlib.sha256(json.dumps([data, *more], sort_keys=True).encode()).hexdigest()[:16]
