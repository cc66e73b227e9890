"""The runs of a comparison side by side, each in a process of its own: a small model gains little from a second thread.

A run's numbers depend on (experiment, recipe, seed) and on how many threads add up, not on what runs beside it.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from halfstep.errors import HalfstepError, RunError
from halfstep.lab.train import Progress, Watcher


Train = Callable[[str, int, Watcher], None]
"""Trains a recipe with a seed. It is sent to other processes, so it can be pickled."""


def train_side_by_side(train: Train, runs: list[tuple[str, int]], jobs: int, watch: Watcher) -> None:
    """Train every (recipe, seed), `jobs` at a time, in order, with as many threads each as torch has here.

    What a run raises is raised here, and ends the others; they go on from their last checkpoints.

    Raises:
        RunError: a process ended by itself, or what is trained cannot be sent to one.
    """
    context, left = get_context("spawn"), deque(runs)
    workers: dict[Connection, SpawnProcess] = {}
    try:
        for _ in range(min(jobs, len(runs))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, train, torch.get_num_threads()), daemon=True)
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise RunError(f"this cannot be trained in a process of its own ({error}); leave --jobs out") from error
            workers[ours] = process
            theirs.close()
            ours.send(left.popleft())
        while workers:
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                said = _heard(connection, workers[connection])
                if isinstance(said, Progress):
                    watch(said)
                elif isinstance(said, Exception):
                    raise said
                elif left:
                    connection.send(left.popleft())
                else:
                    connection.close()
                    workers.pop(connection).join()
    finally:
        for worker in workers.values():
            worker.terminate()
            worker.join()


def _heard(connection: Connection, process: SpawnProcess) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise RunError(
            f"a process that trained ended by itself, with exit code {process.exitcode} (-9: killed, as where memory "
            "ran out). What was trained is kept: go on with --resume, with fewer --jobs"
        ) from None


def _work(connection: Connection, train: Train, threads: int) -> None:
    """Train what comes, until nothing more does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent ends this process
    torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is done, or gone
        while True:
            run = connection.recv()
            try:
                train(run[0], run[1], connection.send)
                connection.send(run)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                if not isinstance(error, HalfstepError):
                    error.add_note(traceback.format_exc())
                connection.send(error)
