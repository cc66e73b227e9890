"""What an experiment is, and its folder: which file lies where, and what a run writes down. No torch is imported here.

experiment.json        the frozen Experiment, its recipes, the data's digest, the task's metric, units and defaults
environment.json       versions, processor, threads
summary.json           the verdicts
report.html, plots/    what people look at
RECIPE/seed-N/         one run: metrics.jsonl, checkpoints/, tensorboard/

A run writes one JSON object a line into `metrics.jsonl`. Every row has `kind` and `step` (0 before the first update).
The kinds:

    memory      parameters, bytes {weights, grads, master, states, transient}: bytes a parameter, measured before step()
    step        loss, lr, loss_scale, skipped, grad_norm, tokens (what the batch holds, in the task's unit), seconds
                (the only timing; null in a baseline that an earlier experiment trained); sharpness (percent, where the
                experiment wants it: tracking.logit_sharpness)
    validation  loss; metric, where the task has one
    statistics  loss_scale; weights, gradients, activation_gradients: exponent histograms {counts, zeros, nonfinite},
                gradients as they are stored, so times loss_scale; zeroed {weights, gradients}: share by format that
                a cast makes zero, unscaled; lost {format: share}: wanted updates that would leave a weight stored in
                it where it is (0 of them in a skipped step); descent {quality, lost_share, layers {name: the same}}:
                how much of the step's updates arrived in what is stored, masters included (null: nothing was wanted)
    ranges      activation_gradients {module: [zeros, of]}, gradients {parameter: [zeros, of]}; after the update,
                states {parameter: {state: [zeros, of]}}, of the elements whose gradient was not zero, and largest
                {parameter: its largest update in learning rates}. With the statistics; and at powers of two, where
                in_float32 has the gradients' zeros of the same weights and batch in float32
    tensors     where the experiment wants it: amaxes {"input of LAYER": the largest magnitude}, saturated {the same, of
                what is rounded: the share beyond the format's largest value}, in the order of computing; updates
                {"weight of LAYER": |update| / |weight|}
    diverged    reason, tensor (the first that was not finite, or null); in_float32, where it can be asked: the
                largest magnitude of that tensor in float32, of the same weights and batch, and compute, the format
                that the recipe computes in
    end         status "finished" or "diverged"; the last row of a run

Numbers that are not finite are null.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TextIO

from halfstep.errors import RunError, unknown


# ---- tasks and metrics -----------------------------------------------------------------------------------------------


def list_tasks() -> list[str]:
    """The names of the tasks, read off their files: `halfstep compare --help` shows them without importing torch."""
    package = find_spec("halfstep.lab.tasks")
    return [info.name for info in iter_modules(package.submodule_search_locations if package else None)]


@dataclass(frozen=True)
class Metric:
    """The metric of a task, besides the loss."""

    name: str
    higher_is_better: bool
    best: float
    """The value of a perfect model."""
    form: str = "{:.4f}"
    """How a value is printed, as a format string."""
    judges: bool = False
    """Whether verdicts use it instead of the loss, where the loss says little about the model's quality."""

    def show(self, value: float | None) -> str:
        """A value as text.

        >>> Metric("accuracy", True, 1.0, "{:.1%}").show(0.987)
        '98.7%'
        """
        return "-" if value is None else self.form.format(value)


@dataclass(frozen=True)
class Facts:
    """The facts of a task that the run folder stores. The defaults are those of folders older than tasks."""

    metric: Metric | None = None
    loss_unit: str = "nats"
    unit: str = "tokens"
    """The unit in which a batch is counted."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The fields of an experiment whose default this task changes."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any] | None) -> Facts:
        """The facts written by `to_dict`; None gives the defaults of old folders.

        Raises:
            RunError: the data has another structure: the file was edited.
        """
        if data is None:
            return cls()
        try:
            metric = data["metric"]
            return cls(**{**data, "metric": None if metric is None else Metric(**metric)})
        except (TypeError, KeyError) as error:
            raise RunError(f"experiment.json: 'task' is not what halfstep writes ({error}); it was edited") from error


# ---- the experiment --------------------------------------------------------------------------------------------------

_LATER: dict[str, Any] = {"optimizer": "adamw", "recipe_lr": {}, "sharpness": 0.0, "tensors": 0}
"""Fields that older experiments lack. They are not written at these values, so that older runs keep their names."""


@dataclass(frozen=True)
class Experiment:
    """One model on one task under several recipes; only learning rates may differ, by `recipe_lr`.

    A seed fixes the initial weights and the order of batches, the same for every recipe.
    """

    recipes: tuple[str, ...]
    task: str = "lm"
    """A task's name, see `halfstep.lab.tasks`; `experiment_for(task, ...)` applies the task's defaults for the fields
    below."""
    model: str = "gpt-tiny"
    data: str | None = None
    """A text file, a folder or a glob; None is the Python standard library's documentation and source."""
    steps: int = 400
    seeds: int = 3
    """Seeds that every recipe is trained with."""
    baseline_seeds: int = 3
    """Seeds that fp32 is trained with, if it takes part and if that is more."""
    margin: float = 0.01
    """The relative loss against fp32 from which a recipe degrades."""
    batch: int = 16
    context: int = 64
    lr: float = 1e-3
    """The peak learning rate: reached after the warm-up, then a cosine towards zero."""
    recipe_lr: Mapping[str, float] = field(default_factory=dict)
    """Peak learning rates by recipe, for recipes that do not use `lr`."""
    optimizer: str = "adamw"
    """An update rule: see `halfstep.optim.update_rules()`."""
    warmup: int = 30
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's betas; for an optimizer with a momentum, the first is the momentum."""
    weight_decay: float = 0.1
    """For optimizers that decay the weights. Adam, NAdam, RMSprop and SGD, which would add it to the gradient, train
    without."""
    clip: float = 1.0
    validations: int = 10
    """How many times the held-out loss is measured, the last time after the last step."""
    statistics: int = 5
    """At how many steps exponents and zeroed shares are recorded."""
    checkpoints: int = 10
    """How many checkpoints a run saves."""
    sharpness: float = 0.0
    """The box around the logits for the loss's sharpness, recorded at each step; 0 records none."""
    tensors: int = 0
    """The number of steps at which each tensor's amax, saturated share and update are recorded; 0 records none."""

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
        """The experiment for training one recipe: with its own learning rate, if it has one."""
        return replace(self, recipes=(recipe,), lr=self.recipe_lr.get(recipe, self.lr), recipe_lr={})

    def named(self, names: Mapping[str, str]) -> Experiment:
        """The same experiment with its recipes replaced by their names.

        Args:
            names: recipe names, by what was asked for (which may be a file).

        Raises:
            RunError: a learning rate is given twice, or for a recipe that does not take part.
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
        """The learning rate of a step, counted from 1: a linear warm-up, then a cosine that reaches zero one step after
        the last."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        progress = (step - self.warmup) / (self.steps + 1 - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * progress))

    def due(self, step: int, times: int) -> bool:
        """Whether an action done `times` times, evenly spaced and last after the last step, is due after `step`."""
        return step * times // self.steps > (step - 1) * times // self.steps

    def runs(self) -> list[tuple[str, int]]:
        """Every (recipe, seed), all recipes of the first seed first, so that a first comparison is available early."""
        counts = {r: max(self.seeds, self.baseline_seeds) if r == "fp32" else self.seeds for r in self.recipes}
        return [(r, s) for s in range(max(counts.values())) for r in self.recipes if s < counts[r]]

    def baselines(self) -> range:
        """Seeds for which cached fp32 runs of an earlier experiment are used, when fp32 does not take part."""
        return range(max(Experiment.baseline_seeds, self.baseline_seeds, self.seeds))

    def to_dict(self) -> dict[str, Any]:
        """The experiment as JSON data."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {name: value for name, value in data.items() if name not in _LATER or value != _LATER[name]}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Experiment:
        """The experiment written by `to_dict`; JSON has lists for tuples."""
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return cls(**given)

    def key(self, *more: object) -> str:
        """A hash of everything that fixes a run's results, except the recipes and the number of seeds."""
        others = ("recipes", "seeds", "baseline_seeds", "margin", "checkpoints")
        data = {name: value for name, value in self.to_dict().items() if name not in others}
        return hashlib.sha256(json.dumps([data, *more], sort_keys=True).encode()).hexdigest()[:16]


# ---- metrics files ---------------------------------------------------------------------------------------------------

Row = dict[str, Any]
TIMINGS = frozenset({"seconds"})
"""The keys whose values vary between runs on one machine; all others are equal in a resumed run."""


class MetricsFile:
    """Appends rows to a metrics file, each written to disk before the next step begins."""

    def __init__(self, path: Path, keep_to: int) -> None:
        """Open `path` and drop its rows beyond step `keep_to`: those that a killed run wrote after its checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(path) if row["step"] <= keep_to and row["kind"] != "end"]
        replace_text(path, "".join(map(_line, kept)))
        self._file: TextIO = path.open("a")

    def write(self, row: Row) -> None:
        """Append a row."""
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics file, [] if there is none; a last line cut short by a kill is dropped.

    Raises:
        RunError: a line before the last is not a row: the file was edited.
    """
    return list(_rows(path)) if path.is_file() else []


def _rows(path: Path) -> Iterator[Row]:
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int) or not isinstance(row["kind"], str):
                raise ValueError("no step or kind")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                return
            raise RunError(
                f"{path}, line {number}: this is not a metrics row ({error}); the file was edited"
            ) from error
        yield row


def _line(row: Row) -> str:
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return {key: _finite(item) for key, item in value.items()} if isinstance(value, dict) else value


# ---- the run folder --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """The folder of one experiment."""

    path: Path

    @classmethod
    def create(
        cls,
        path: Path,
        experiment: Experiment,
        digest: str,
        environment: dict[str, Any],
        facts: Facts | None = None,
        recipes: dict[str, Any] | None = None,
    ) -> RunFolder:
        """Create a folder and write its experiment into it.

        Raises:
            RunError: the folder cannot be written, or is not empty.
        """
        folder = cls(path)
        if folder.experiment_file.exists():
            raise RunError(f"{path} holds an experiment already; go on with --resume, or give another --out")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise RunError(f"{path} is not empty and holds no experiment; give another --out")
            write_json(folder.environment_file, environment)
            content = {"experiment": experiment.to_dict(), "data_sha256": digest, "recipes": recipes or {}}
            write_json(folder.experiment_file, content if facts is None else {**content, "task": asdict(facts)})
        return folder

    @classmethod
    def resume(cls, path: Path, experiment: Experiment) -> RunFolder:
        """The folder of the same experiment, which may have more seeds than before.

        Raises:
            RunError: there is no experiment, or it differs; the first difference is named.
        """
        folder = cls(path)
        recorded = asdict(folder.experiment())
        for name, value in asdict(experiment).items():
            if recorded[name] != value and not (name in ("seeds", "baseline_seeds") and value > recorded[name]):
                raise RunError(
                    f"{path} holds another experiment: its {name} is {recorded[name]!r}, {value!r} was asked for. "
                    "Ask for the same, or give another --out"
                )
        return folder

    def extend(self, experiment: Experiment, digest: str) -> None:
        """Write the experiment with its larger number of seeds, if the data still has that digest.

        Raises:
            RunError: the folder's runs were trained on other data; experiment.json cannot be written.
        """
        content = read_json(self.experiment_file)
        if content.get("data_sha256") != digest:
            raise RunError(
                f"{self.path} was trained on other data than this; the data have changed. Give another --out"
            )
        if experiment != self.experiment():
            with writing(self.experiment_file, "mend that"):
                write_json(self.experiment_file, {**content, "experiment": experiment.to_dict()})

    @property
    def experiment_file(self) -> Path:
        """experiment.json"""
        return self.path / "experiment.json"

    @property
    def environment_file(self) -> Path:
        """environment.json"""
        return self.path / "environment.json"

    def run(self, recipe: str, seed: int) -> Path:
        """The folder of one run."""
        return self.path / recipe / f"seed-{seed}"

    def metrics(self, recipe: str, seed: int) -> list[Row]:
        """The rows of one run."""
        return read_metrics(self.run(recipe, seed) / "metrics.jsonl")

    def recipes(self) -> dict[str, Any]:
        """The recipes as data, as saved when the folder was created; None for a recipe that cannot be saved as data."""
        found = read_json(self.experiment_file).get("recipes", {}) if self.experiment_file.is_file() else {}
        return found if isinstance(found, dict) else {}

    def facts(self) -> Facts:
        """The task's facts, as saved when the folder was created.

        Raises:
            RunError: the file was edited.
        """
        return Facts.from_data(read_json(self.experiment_file).get("task"))

    def experiment(self) -> Experiment:
        """The experiment saved in the folder.

        Raises:
            RunError: there is no experiment, or the file was edited.
        """
        if not self.experiment_file.is_file():
            raise RunError(f"{self.path} holds no experiment to resume; leave --resume away to start one")
        try:
            return Experiment.from_data(read_json(self.experiment_file).get("experiment"))  # type: ignore[arg-type]
        except (AttributeError, TypeError) as error:
            raise RunError(f"{self.experiment_file} holds another experiment than halfstep writes ({error})") from error


# ---- reading and writing files ---------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path, advice: str = "give another --out") -> Iterator[None]:
    """A context in which an OSError becomes a RunError that says the path cannot be written.

    Raises:
        RunError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); {advice}") from error


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically: a kill leaves the old file or the new one."""
    replace_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a text atomically: a kill leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        RunError: the file does not contain one.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as JSON ({error}); it is damaged or was edited") from error
    if not isinstance(data, dict):
        raise RunError(f"{path} holds {type(data).__name__}; expected a JSON object")
    return data
