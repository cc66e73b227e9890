"""The run folder: which file lies where. This file imports no torch.

experiment.json        the frozen Experiment, its recipes, the data's digest, the task's metric, units and defaults
environment.json       versions, processor, threads
summary.json           the verdicts
report.html, plots/    what people look at
RECIPE/seed-N/         one run: metrics.jsonl, checkpoints/, tensorboard/
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import RunError
from halfstep.lab.experiment import Experiment
from halfstep.lab.facts import Facts
from halfstep.lab.metrics import Row, read_metrics


_SEEDS = ("seeds", "baseline_seeds")


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
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise RunError(f"{path} is not empty and holds no experiment; give another --out")
            write_json(folder.environment_file, environment)
            content = {"experiment": experiment.to_dict(), "data_sha256": digest, "recipes": recipes or {}}
            write_json(folder.experiment_file, content if facts is None else {**content, "task": facts.to_dict()})
        except OSError as error:
            raise RunError(f"{path} cannot be written ({error.strerror}); give another --out") from error
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
            if recorded[name] != value and not (name in _SEEDS and value > recorded[name]):
                raise RunError(
                    f"{path} holds another experiment: its {name} is {recorded[name]!r}, {value!r} was asked for. "
                    "Ask for the same, or give another --out"
                )
        return folder

    def check_data(self, digest: str) -> None:
        """Refuse other data than the folder's runs were trained on.

        Raises:
            RunError: their digest is another.
        """
        if read_json(self.experiment_file).get("data_sha256") != digest:
            raise RunError(
                f"{self.path} was trained on other data than this; the data have changed. Give another --out"
            )

    def extend(self, experiment: Experiment) -> None:
        """Write down that the experiment has more seeds now.

        Raises:
            RunError: experiment.json cannot be written.
        """
        if experiment != self.experiment():
            try:
                write_json(
                    self.experiment_file, {**read_json(self.experiment_file), "experiment": experiment.to_dict()}
                )
            except OSError as error:
                raise RunError(f"{self.experiment_file} cannot be written ({error.strerror}); mend that") from error

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
        data = read_json(self.experiment_file).get("experiment")
        try:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}  # type: ignore[union-attr]
            return Experiment(**fields)
        except (AttributeError, TypeError) as error:
            raise RunError(f"{self.experiment_file} holds another experiment than halfstep writes ({error})") from error


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
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
