"""The runs of a comparison, or of a sweep, side by side in processes: a small model gains little from a second thread.

A run's numbers depend on (experiment, recipe, seed) and on how many threads add up, not on what runs beside it.
"""

import pickle
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

import torch

from halfstep.errors import HalfstepError, RunError


R = TypeVar("R", bound=tuple[Hashable, ...])
Lost = Callable[[R, str], None]
"""Takes a run whose process ended by itself in each of `ATTEMPTS`, and why."""
ATTEMPTS = 3


def train_side_by_side(
    train: Callable[..., None],
    runs: Sequence[R],
    jobs: int,
    watch: Callable[[Any], None],
    lost: Lost[R] | None = None,
) -> None:
    """Call `train(*run, watch)` for every run, `jobs` at a time, in order, with as many threads each as torch has here;
    one at a time in this process.

    What a run raises is raised here, and ends the others; they go on from their last checkpoints.

    Args:
        train: it is sent to other processes, so it can be pickled; so can what it gives to `watch`.
        lost: where given, a run whose process ends by itself is tried again, and in the end handed to it.

    Raises:
        RunError: a process ended by itself and there is no `lost`, or what is trained cannot be sent to one.
    """
    if jobs == 1:
        for run in runs:
            train(*run, watch)
        return
    context, left, tried = get_context("spawn"), deque(runs), Counter[R]()
    workers: dict[Connection, tuple[SpawnProcess, R]] = {}

    def begin() -> None:
        connection, process = _started(context, train)
        workers[connection] = process, left[0]
        connection.send(left.popleft())

    try:
        for _ in range(min(jobs, len(runs))):
            begin()
        while workers:
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                process, run = workers[connection]
                said = _heard(connection, process)
                if isinstance(said, _Ended):
                    if lost is None:
                        raise RunError(f"{said}: go on with --resume, with fewer --jobs")
                    workers.pop(connection)
                    tried[run] += 1
                    if tried[run] < ATTEMPTS:
                        left.appendleft(run)
                    else:
                        lost(run, f"{said} {ATTEMPTS} times")
                    if left:
                        begin()
                elif isinstance(said, Exception):
                    raise said
                elif said is not None:
                    watch(said)
                elif left:
                    workers[connection] = process, left[0]
                    connection.send(left.popleft())
                else:
                    connection.close()
                    workers.pop(connection)[0].join()
    finally:
        for process, _ in workers.values():
            process.terminate()
            process.join()


class _Ended(str):
    """Why a process ended that was to go on, in words."""


def _started(context: SpawnContext, train: Callable[..., None]) -> tuple[Connection, SpawnProcess]:
    """A process that waits for runs, and our end of its pipe."""
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, train, torch.get_num_threads()), daemon=True)
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(f"this cannot be trained in a process of its own ({error}); leave --jobs out") from error
    theirs.close()
    return ours, process


def _heard(connection: Connection, process: SpawnProcess) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        return _Ended(
            f"a process that trained ended by itself, with exit code {process.exitcode} (-9: killed, as where memory "
            "ran out). What was trained is kept"
        )


def _work(connection: Connection, train: Callable[..., None], threads: int) -> None:
    """Train what comes, until nothing more does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent ends this process
    torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is done, or gone
        while True:
            run = connection.recv()
            try:
                train(*run, connection.send)
                connection.send(None)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                if not isinstance(error, HalfstepError):
                    error.add_note(traceback.format_exc())
                connection.send(error)
