"""Run cells on a Ray cluster whose machines see the sweep's folder; without an address, on one started here."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from halfstep.errors import RunError
from halfstep.lab.compare import ATTEMPTS
from halfstep.lab.sweep.folder import Cell
from halfstep.lab.sweep.run import Beat, Cells, quietly


_PATIENCE = 10.0  # seconds for an address to answer


@dataclass(frozen=True)
class Ray:
    """One Ray task per cell, with as many CPUs as the sweep has threads; Ray retries if a worker or machine is lost."""

    at_once: int

    def run(
        self, train: Cells, cells: Sequence[Cell], watch: Callable[[Beat], None], lost: Callable[[Cell, str], None]
    ) -> None:
        """See `Executor.run`; `watch` is called when a cell has ended."""
        task = ray.remote(num_cpus=train.sweep.threads, max_retries=ATTEMPTS - 1)(quietly)
        shared, left = ray.put(train), list(cells)
        running: dict[Any, Cell] = {}
        try:
            while left or running:
                while left and len(running) < self.at_once:
                    cell = left.pop(0)
                    running[task.remote(shared, cell)] = cell
                for done in ray.wait(list(running))[0]:
                    cell = running.pop(done)
                    try:
                        ray.get(done)
                    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
                        lost(cell, f"Ray lost the process that trained it {ATTEMPTS} times ({type(error).__name__})")
                    except ray.exceptions.RayTaskError as error:
                        raise RunError(f"a Ray worker could not train {cell}: {error.cause}") from error
                    else:
                        watch(cell)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            ray.shutdown()


def executor(where: str, jobs: int) -> Ray:
    """Connect to the cluster at that address (`auto`: one that runs on this machine), or start one here.

    Raises:
        RunError: it does not answer.
    """
    try:
        host, _, port = where.removeprefix("ray://").rpartition(":")
        if host and port.isdigit():  # Ray itself tries for many minutes
            socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
        if where:
            ray.init(address=where, log_to_driver=False, logging_level="error")
        else:
            ray.init(num_cpus=jobs, include_dashboard=False, object_store_memory=2**28, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"--executor ray:{where}: no Ray cluster answers there ({said}); start one with `ray start --head` and "
            "give its address, or leave the address away for one on this machine"
        ) from error
    return Ray(int(ray.cluster_resources().get("CPU", jobs)) if where else jobs)
