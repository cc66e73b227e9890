"""A sweep's cells equal the runs of `compare`, in any number of processes, even after kills."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from halfstep.errors import RunError
from halfstep.lab.compare import ATTEMPTS, open_experiment, train_side_by_side
from halfstep.lab.experiment import TIMINGS
from halfstep.lab.sweep.executors import get_executor
from halfstep.lab.sweep.folder import Sweep, SweepFolder, read_grid
from halfstep.lab.sweep.report import write_report
from halfstep.lab.sweep.run import open_sweep, run_sweep
from halfstep.lab.tasks import experiment_for


MODEL = """
import os
from pathlib import Path
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

class Fails(nn.Sequential):
    def forward(self, x):
        if self.training and Path("broken").exists():
            raise RuntimeError("planted")
        return super().forward(x)

def fails():
    return Fails(nn.Embedding(256, 8), nn.Linear(8, 256))
"""
FIELDS = {"steps": 4, "batch": 2, "context": 16, "warmup": 1, "statistics": 1, "validations": 2, "checkpoints": 4}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_models.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("some text to learn from\n" * 200)
    return tmp_path


def a_sweep(grid=None, seeds=2, model="small_models.py:model", recipes=("fp32", "bf16-mixed"), **fields):
    given = {**FIELDS, "data": "text.txt", "model": model, "seeds": seeds, "baseline_seeds": seeds, **fields}
    return Sweep(experiment_for("lm", recipes=recipes, **given), grid or {"lr": (1e-3, 1e-2)})


def trained(path, sweep, jobs=1, resume=False, retry=False):
    progress = []
    run_sweep(open_sweep(sweep, path, resume), get_executor("local", jobs), progress.append, retry)
    return progress


def numbers(path):
    """The rows of every cell, without timings."""
    folder = SweepFolder(path)
    cells = folder.sweep().cells()
    return {cell: [{k: v for k, v in row.items() if k not in TIMINGS} for row in folder.rows(cell)] for cell in cells}


@pytest.mark.slow
def test_cells_equal_the_runs_of_compare(place):
    sweep = a_sweep()
    progress = trained(place / "swept", sweep)
    cells = sweep.cells()
    assert [line for line in progress if isinstance(line, tuple)] == cells
    assert cells[:3] == [("lr-0.001", "fp32", 0), ("lr-0.01", "fp32", 0), ("lr-0.001", "bf16-mixed", 0)]
    found = numbers(place / "swept")
    compared = open_experiment(replace(sweep.experiment, lr=1e-2), place / "alone" / "run", resume=False)
    compared.run()
    for recipe, seed in compared.experiment.runs():
        rows = [{k: v for k, v in row.items() if k not in TIMINGS} for row in compared.folder.metrics(recipe, seed)]
        assert rows == found["lr-0.01", recipe, seed]
    assert found["lr-0.001", "fp32", 0] != found["lr-0.01", "fp32", 0]


@pytest.mark.slow
def test_sweep_continues_with_more_seeds_and_values(place):
    trained(place / "swept", a_sweep(seeds=1))
    before = numbers(place / "swept")
    progress = trained(place / "swept", a_sweep({"lr": (1e-3, 3e-3, 1e-2)}, seeds=2), resume=True)
    after = numbers(place / "swept")
    assert len([line for line in progress if isinstance(line, tuple)]) == len(after) - len(before) == 12 - 4
    assert all(after[cell] == rows for cell, rows in before.items())


def test_failed_cells_are_recorded_and_can_be_retried(place):
    sweep = a_sweep({"model": ("small_models.py:model", "small_models.py:fails")}, seeds=1)
    cells = open_sweep(sweep, place / "other", False)
    (place / "broken").touch()
    run_sweep(cells, get_executor("local", 1), lambda line: None)
    folder = SweepFolder(place / "other")
    states = {cell: folder.state(cell) for cell in sweep.cells()}
    failed = [cell for cell, state in states.items() if state.status == "failed"]
    assert failed == [cell for cell in sweep.cells() if "fails" in cell[0]]
    assert "ModelError: small_models.py:fails: under fp32, seed 0, it raised RuntimeError: planted" in (
        states[failed[0]].reason
    )
    assert write_report(place / "other")["cells"] == {
        "all": 4, "finished": 2, "diverged": 0, "failed": 2, "begun": 0, "waiting": 0,
    }  # fmt: skip
    (place / "broken").unlink()
    assert not trained(place / "other", sweep, resume=True)  # failed cells count as done
    trained(place / "other", sweep, resume=True, retry=True)
    assert all(folder.state(cell).status == "finished" for cell in sweep.cells())


def test_second_sweep_on_a_folder_raises(place):
    sweep = a_sweep(seeds=1)
    cells = open_sweep(sweep, place / "swept", False)
    folder = SweepFolder(place / "swept")
    assert not folder.is_worked_on()
    with folder.locked():
        assert folder.is_worked_on()
        with pytest.raises(RunError, match=rf"another sweep \(process {os.getpid()}\); wait for it, or end it"):
            run_sweep(cells, get_executor("local", 1), lambda line: None)
    assert not folder.is_worked_on()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 5}, "its steps is 4, 5 was asked for"),
        ({"seeds": 1}, "its seeds is 2, 1 was asked for"),
        ({"grid": {"lr": (1e-3,)}}, "its grid is .*0.01.*was asked for"),
        ({"grid": {"steps": (4,)}}, "its grid is"),
    ],
)
def test_resuming_with_another_sweep_raises(place, change, message):
    open_sweep(a_sweep(), place / "swept", False)
    with pytest.raises(RunError, match=message):
        open_sweep(a_sweep(**change), place / "swept", True)


def test_folder_without_a_sweep_raises(place):
    open_experiment(a_sweep().experiment, place / "compared", resume=False)
    with pytest.raises(RunError, match=r"expected the folder of a sweep, with sweep.json; found a single experiment"):
        open_sweep(a_sweep(), place / "compared", True)
    with pytest.raises(RunError, match="is not empty and holds no sweep"):
        open_sweep(a_sweep(), place / "compared", False)
    open_sweep(a_sweep(), place / "swept", False)
    with pytest.raises(RunError, match="holds a sweep already; go on with --resume"):
        open_sweep(a_sweep(), place / "swept", False)
    (place / "swept" / "sweep.json").write_text('{"grid": 3}')
    with pytest.raises(RunError, match=r"sweep.json: this is no sweep that halfstep wrote"):
        SweepFolder(place / "swept").sweep()


def test_untrainable_grid_points_raise_and_write_nothing(place):
    for grid, message in [
        ({"model": ("small_models.py:model", "small_models.py:none")}, "at model-small_models.py_none: .*none"),
        ({"lr": (1e-3, -1.0)}, "lr = -1.0 given; expected a positive number"),
    ]:
        with pytest.raises(Exception, match=message):
            open_sweep(a_sweep(grid), place / "swept", False)
        assert not list(place.glob("swept/*"))
    open_sweep(a_sweep(), place / "swept", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr=", "no values; expected them by commas"),
        ("lr=fast", "could not convert string to float: 'fast'; expected values by commas"),
        ("steps=1.5", "expected values by commas"),
        ("rate=1", "unknown axis 'rate'"),
        ("seeds=1,2", "unknown axis 'seeds'"),
    ],
)
def test_malformed_grid_raises(text, message):
    with pytest.raises(RunError, match=message):
        read_grid([text])


def test_duplicate_axes_values_and_points_raise():
    with pytest.raises(RunError, match="the axis lr is given twice"):
        read_grid(["lr=1", "lr=2"])
    with pytest.raises(RunError, match="expected values, each once"):
        a_sweep({"lr": (1e-3, 1e-3)})
    with pytest.raises(RunError, match="two points of the grid would have the same folder"):
        a_sweep({"lr": (0.1, 0.1000000001)})
    with pytest.raises(RunError, match="--sample 5 of a grid of 4 points; expected 1 to 4"):
        replace(a_sweep({"lr": (1.0, 2.0), "steps": (3, 4)}), sample=5)
    with pytest.raises(RunError, match="--threads 0; expected at least 1"):
        replace(a_sweep(), threads=0)
    whole = a_sweep({"lr": (1.0, 2.0), "steps": (3, 4)})
    assert list(whole.points()) == ["lr-1__steps-3", "lr-1__steps-4", "lr-2__steps-3", "lr-2__steps-4"]
    assert whole.points()["lr-2__steps-3"] == replace(whole.experiment, lr=2.0, steps=3)
    some = replace(whole, sample=2)
    assert some.points().items() < whole.points().items()
    assert Sweep.from_data(json.loads(json.dumps(some.to_dict()))) == some
    assert list(replace(whole, grid={}).points()) == ["all"]


def dies_once(point, recipe, seed, watch):
    """Dies at the first attempt of seed 1 and at every attempt of seed 2; runs in a separate process."""
    tried = f"tried-{seed}-"
    count = len([name for name in os.listdir() if name.startswith(tried)])
    open(f"{tried}{count}", "w").close()
    if (seed == 1 and not count) or seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    watch((point, recipe, seed))


@pytest.mark.slow
def test_killed_process_is_retried_a_limited_number_of_times(place):
    done, lost = [], []
    runs = [("p", "fp32", seed) for seed in range(4)]
    train_side_by_side(dies_once, runs, 2, done.append, lambda run, reason: lost.append((run, reason)))
    assert sorted(done) == [runs[0], runs[1], runs[3]]
    ((run, reason),) = lost
    assert run == runs[2]
    assert f"exit code -9 (-9: killed, as where memory ran out). What was trained is kept {ATTEMPTS} times" in reason
    assert len(list(place.glob("tried-2-*"))) == ATTEMPTS


COMMAND = ["sweep", "--recipes", "fp32,bf16-stochastic", "--data", "text.txt", "--model", "small_models.py:model"]
GRID = ["--steps", "12", "--batch", "2", "--context", "16", "--seeds", "5", "--grid", "lr=1e-3,1e-2,3e-2,0.1"]


def halfstep(*arguments):
    return subprocess.Popen([sys.executable, "-m", "halfstep", *arguments], stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_sweep_killed_five_times_gives_the_same_results(place):
    assert halfstep(*COMMAND, *GRID, "--out", "whole", "--jobs", "1").wait() == 0
    more, kills = GRID, 0
    while True:
        process = halfstep(*COMMAND, *more, "--out", "killed", "--jobs", "2")
        goal = 5 * (kills + 1)
        while process.poll() is None and kills < 5:
            ended = len(list(place.glob("killed/*/*/*/cell.json")))
            if ended >= goal:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.02)
        if process.wait() == 0:
            break
        more = ["--resume"]
    assert kills == 5
    assert numbers(place / "killed") == numbers(place / "whole")
    assert len(numbers(place / "whole")) == 40


@pytest.mark.slow
def test_ray_gives_the_same_results_despite_a_killed_worker(place):
    ray = pytest.importorskip("ray")
    sweep = a_sweep({"lr": (1e-3, 1e-2)}, seeds=2)
    trained(place / "here", sweep)
    cells = open_sweep(sweep, place / "there", False)
    executor = get_executor("ray", 2)
    killed = []

    def watch(line):
        if not killed and (worker := kill_a_worker()) is not None:
            killed.append(worker)

    run_sweep(cells, executor, watch)
    assert killed
    assert not ray.is_initialized()
    assert numbers(place / "there") == numbers(place / "here")


@pytest.mark.slow
def test_ray_gives_the_same_results_despite_a_lost_node(place):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    sweep = a_sweep({"lr": (1e-3, 3e-3, 1e-2)}, seeds=2)
    trained(place / "here", sweep)
    cells = open_sweep(sweep, place / "there", False)
    small = {"object_store_memory": 2**27, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        machines = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
        executor = get_executor(f"ray:{cluster.address}", 1)
        assert executor.at_once == 2
        ended = []

        def watch(line):
            ended.append(line)
            if machines:
                cluster.remove_node(machines.pop(), allow_graceful=False)
                machines.clear()

        run_sweep(cells, executor, watch)
    finally:
        cluster.shutdown()
    assert sorted(ended) == sorted(sweep.cells())
    assert numbers(place / "there") == numbers(place / "here")


def kill_a_worker():
    """Kill a Ray worker that is training; returns its process id."""
    for folder in os.listdir("/proc"):
        try:
            with open(f"/proc/{folder}/cmdline") as file:
                if folder.isdigit() and file.read().startswith("ray::_train"):
                    os.kill(int(folder), signal.SIGKILL)
                    return folder
        except OSError:
            continue
    return None


@pytest.mark.slow
def test_unreachable_ray_address_raises():
    pytest.importorskip("ray")
    with pytest.raises(RunError, match=r"--executor ray:127.0.0.1:1: no Ray cluster answers there"):
        get_executor("ray:127.0.0.1:1", 1)


def test_unknown_executors_raise():
    with pytest.raises(RunError, match="unknown executor 'dask'"):
        get_executor("dask", 1)
    with pytest.raises(RunError, match="local, which has no address"):
        get_executor("local:here", 1)


@pytest.mark.slow
def test_submitit_gives_the_same_results(place):
    pytest.importorskip("submitit")
    sweep = a_sweep({"lr": (1e-3,)}, seeds=2)
    trained(place / "here", sweep)
    run_sweep(open_sweep(sweep, place / "there", False), get_executor("submitit:local", 2), lambda line: None)
    assert numbers(place / "there") == numbers(place / "here")
    with pytest.raises(RunError, match=r"submitit:gpu: found no Slurm \(sbatch\) on this machine"):
        get_executor("submitit:gpu", 1)
