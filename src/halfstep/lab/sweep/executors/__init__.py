"""Where a sweep's cells are trained: local processes, a Ray cluster, or Slurm; one file each."""

from importlib import import_module
from pkgutil import iter_modules

from halfstep.errors import RunError, one_of
from halfstep.lab.sweep.run import Executor


def get_executor(text: str, jobs: int) -> Executor:
    """The executor named by `NAME` or `NAME:WHERE`: `local`, `ray`, `ray:10.0.0.1:6379`, `submitit:PARTITION`.

    Args:
        jobs: how many cells at once.

    Raises:
        RunError: there is no such executor, or it cannot be reached.
        ModuleNotFoundError: its library is not installed.
    """
    name, _, where = text.partition(":")
    one_of("executor", name, [module.name for module in iter_modules(__path__)], RunError)
    return import_module(f"{__name__}.{name}").executor(where, jobs)  # type: ignore[no-any-return]
