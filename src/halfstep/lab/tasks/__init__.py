"""The tasks that recipes are compared on, one file each: `halfstep compare --task NAME`."""

from typing import Any

from halfstep.errors import RunError, one_of
from halfstep.lab.experiment import Experiment
from halfstep.lab.task import TaskSpec
from halfstep.registry import family


_named = family(__name__, TaskSpec)


def get_task(name: str) -> TaskSpec:
    """The task of that name.

    Raises:
        RunError: no task has that name; the message suggests the nearest ones.
    """
    return _named()[one_of("task", name, _named(), RunError)]


def experiment_for(task: str, **given: Any) -> Experiment:
    """An experiment on a task: the given fields, then the task's own defaults, then those of `Experiment`.

    Raises:
        RunError: no such task; a field that this task does not read; an invalid value.
    """
    spec = get_task(task)
    special = {option for other in _named().values() for option in other.options}
    for name in sorted(special & given.keys() - set(spec.options)):
        owners = ", ".join(other.name for other in _named().values() if name in other.options)
        raise RunError(f"task {task!r} does not read --{name.replace('_', '-')}; it is an option of: {owners}")
    return Experiment(task=task, **{**spec.facts.defaults, **given})
