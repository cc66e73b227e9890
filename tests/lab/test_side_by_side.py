"""Parallel runs equal sequential runs bit for bit; errors in one are reported, and nothing hangs."""

import os

import pytest
import torch

from halfstep.errors import ModelError, RunError
from halfstep.lab.compare import open_experiment, train_side_by_side
from halfstep.lab.experiment import TIMINGS, Experiment
from halfstep.lab.train import Progress


MODEL = "from torch import nn\ndef model():\n    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
RUNS = [(recipe, seed) for seed in range(2) for recipe in ("fp32", "bf16-stochastic", "fp16-mixed")]


def trained(recipe, seed, watch):
    if recipe == "raises":
        raise ModelError("planted")
    if recipe == "dies":
        os._exit(3)
    watch(Progress(recipe, seed, os.getpid(), {}, None))


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_parallel_runs_equal_sequential_runs(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_models.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("some text to learn from\n" * 200)
    fields = {"seeds": 2, "baseline_seeds": 2, "steps": 6, "batch": 2, "context": 16, "warmup": 1, "statistics": 1}
    experiment = Experiment(
        recipes=("fp32", "bf16-stochastic", "fp16-mixed"), data="text.txt", model="small_models.py:model", **fields
    )
    found, seen = [], []
    for jobs in (1, 2):
        comparison = open_experiment(experiment, tmp_path / f"with-{jobs}" / "run", resume=False)
        comparison.run(lambda progress: seen.append((progress.recipe, progress.seed, progress.step)), jobs)
        found.append(
            [
                [{k: v for k, v in row.items() if k not in TIMINGS} for row in comparison.folder.metrics(*run)]
                for run in RUNS
            ]
        )
    assert found[0] == found[1]
    assert sorted(seen[:36]) == sorted(seen[36:]) == sorted((*run, step) for run in RUNS for step in range(1, 7))


@pytest.mark.slow
def test_each_job_is_one_process_for_several_runs():
    seen = []
    train_side_by_side(trained, RUNS, 2, seen.append)
    assert sorted((progress.recipe, progress.seed) for progress in seen) == sorted(RUNS)
    assert os.getpid() not in (processes := {progress.step for progress in seen})
    assert 1 <= len(processes) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [("raises", ModelError, "planted"), ("dies", RunError, "exit code 3.* --resume, with fewer --jobs")],
)
def test_error_in_one_run_ends_all(recipe, error, message):
    with pytest.raises(error, match=message):
        train_side_by_side(trained, [("fp32", 0), (recipe, 0), *RUNS], 2, lambda progress: None)


def test_unpicklable_function_raises():
    with pytest.raises(RunError, match="leave --jobs out"):
        train_side_by_side(lambda *run: None, RUNS, 2, lambda progress: None)
