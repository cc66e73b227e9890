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


# ---- the experiment --------------------------------------------------------------------------------------------------

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


# ---- metrics files ---------------------------------------------------------------------------------------------------

Row = dict[str, Any]
TIMINGS = frozenset({"seconds"})
"""The keys whose values depend on the machine's mood; all others are equal in a resumed run."""


class MetricsFile:
    """Appends rows, each on disk before the next step begins."""

    def __init__(self, path: Path, keep_to: int) -> None:
        """Open `path` and drop what it holds beyond step `keep_to`: a killed run's rows since its checkpoint."""
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
    """The rows of a metrics file, [] where there is none; a last line cut short by a kill is dropped.

    Raises:
        RunError: a line in the middle is not a row: the file was edited.
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
        """A new folder, with its experiment written down.

        Raises:
            RunError: the folder cannot be written, or holds something already.
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
        """The folder of the same experiment, which may have more seeds now.

        Raises:
            RunError: there is no experiment, or it is another one; the first difference is named.
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
        """Write down that the experiment, on data of that digest, has more seeds now.

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
        """The recipes as they were when the folder was made, as data; None for one that data do not hold."""
        found = read_json(self.experiment_file).get("recipes", {}) if self.experiment_file.is_file() else {}
        return found if isinstance(found, dict) else {}

    def facts(self) -> Facts:
        """What the task told of itself when the folder was made.

        Raises:
            RunError: the file was edited.
        """
        return Facts.from_data(read_json(self.experiment_file).get("task"))

    def experiment(self) -> Experiment:
        """The experiment written down.

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
    """While active, an error of the disk says that the path cannot be written.

    Raises:
        RunError: it cannot.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); {advice}") from error


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    replace_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a text so that a kill leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        RunError: the file holds none.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as JSON ({error}); it is damaged or was edited") from error
    if not isinstance(data, dict):
        raise RunError(f"{path} holds {type(data).__name__}; expected a JSON object")
    return data
