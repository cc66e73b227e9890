"""The run folder: which file lies where, and what a run writes down. This file imports no torch.

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

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from halfstep.errors import RunError
from halfstep.lab.experiment import Experiment, Facts


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
