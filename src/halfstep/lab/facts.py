"""What a task tells reports: its metric, its units, its defaults. This file imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from halfstep.errors import RunError


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

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

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
