"""Run cells as Slurm jobs on nodes that see the sweep's folder; `submitit:local` runs them as processes here."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import submitit

from halfstep.errors import RunError
from halfstep.lab.compare import ATTEMPTS
from halfstep.lab.sweep.folder import Cell
from halfstep.lab.sweep.run import Beat, Cells, quietly


_PAUSE = 0.5  # seconds between two looks at the jobs
_MINUTES = 24 * 60


@dataclass(frozen=True)
class Submitit:
    """At most `at_once` jobs of one cell each, with as many CPUs as the sweep has threads, for at most a day."""

    at_once: int
    partition: str

    def run(
        self, train: Cells, cells: Sequence[Cell], watch: Callable[[Beat], None], lost: Callable[[Cell, str], None]
    ) -> None:
        """See `Executor.run`; `watch` is called when a cell has ended."""
        here = self.partition == "local"
        place = submitit.AutoExecutor(train.folder.path / "submitit", cluster="local" if here else "slurm")
        place.update_parameters(name="halfstep-sweep", cpus_per_task=train.sweep.threads, timeout_min=_MINUTES)
        if self.partition and not here:
            place.update_parameters(slurm_partition=self.partition)
        left, tried = deque(cells), Counter[Cell]()
        running: dict[Any, Cell] = {}
        try:
            while left or running:
                while left and len(running) < self.at_once:
                    cell = left.popleft()
                    running[place.submit(quietly, train, cell)] = cell
                for job in [job for job in running if job.done()]:
                    cell = running.pop(job)
                    error = job.exception()
                    if isinstance(error, submitit.core.utils.FailedJobError):
                        raise RunError(f"a job of Slurm could not train {cell}: {error}") from error
                    if error is None:
                        watch(cell)
                        continue
                    tried[cell] += 1
                    if tried[cell] < ATTEMPTS:
                        left.appendleft(cell)
                    else:
                        lost(cell, f"its job ended by itself {ATTEMPTS} times ({str(error).splitlines()[0]})")
                time.sleep(_PAUSE)
        finally:
            for job in running:
                job.cancel(check=False)


def executor(where: str, jobs: int) -> Submitit:
    """The executor for a partition; for Slurm's default partition if none is named.

    Raises:
        RunError: there is no Slurm on this machine.
    """
    if where != "local" and submitit.AutoExecutor.which() != "slurm":
        raise RunError(
            f"--executor submitit{where and ':' + where}: found no Slurm (sbatch) on this machine; go to one of its "
            "login nodes, or try submitit:local"
        )
    return Submitit(jobs, where)
