"""Run cells in processes of this machine; with one job, in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfstep.errors import RunError
from halfstep.lab.compare import train_side_by_side
from halfstep.lab.sweep.folder import Cell
from halfstep.lab.sweep.run import Beat, Cells


@dataclass(frozen=True)
class Local:
    """Trains `at_once` cells at a time, in processes that each take the next cell when they finish one."""

    at_once: int

    def run(
        self, train: Cells, cells: Sequence[Cell], watch: Callable[[Beat], None], lost: Callable[[Cell, str], None]
    ) -> None:
        """See `Executor.run`."""
        train_side_by_side(train, cells, self.at_once, watch, lost)


def executor(where: str, jobs: int) -> Local:
    """The local executor with `jobs` processes.

    Raises:
        RunError: an address is given.
    """
    if where:
        raise RunError(f"--executor local:{where}; expected local, which has no address, or ray:ADDRESS")
    return Local(jobs)
