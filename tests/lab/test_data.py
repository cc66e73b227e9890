"""The corpus, batches, models and experiments: contents, and rejected inputs."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from halfstep.errors import DataError, ModelError, RunError
from halfstep.lab.experiment import Experiment
from halfstep.lab.models import build_model
from halfstep.lab.task import load_corpus
from halfstep.lab.tasks.lm import LanguageModelling


LINE = b"the quick brown fox jumps over the lazy dog\n"


@pytest.mark.slow
def test_standard_library_corpus_is_large_and_reproducible():
    corpus = load_corpus(None, 64)
    assert len(corpus.train) > 3_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.train) < 0.2
    assert bytes(corpus.train[:200].tolist()).isascii()
    assert corpus.digest == load_corpus(None, 64).digest


def test_corpus_of_a_file_folder_or_glob(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(LINE * (i + 1))
    one = load_corpus(str(tmp_path / "39.txt"), 16)
    assert bytes(one.train.tolist()) + bytes(one.held_out.tolist()) == LINE * 40
    folder, pattern = load_corpus(str(tmp_path), 16), load_corpus(str(tmp_path / "*.txt"), 16)
    assert folder.digest == pattern.digest != one.digest
    assert bytes(folder.held_out.tolist()) == LINE * 20 + b"\n" + LINE * 40  # every twentieth document


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "every file is empty"),
        (b"  \n ", "every file is empty"),
        (b"too short", "its training part has 9 bytes, and a context of 16 needs at least 34"),
        (LINE * 9, "its held-out part has 19 bytes, and a context of 16 needs at least 34"),
        (LINE * 100 + b"\0" + LINE, r"is binary \(it holds a zero byte at 4400\)"),
    ],
)
def test_empty_short_or_binary_files_raise(tmp_path, content, message):
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_corpus(str(path), 16)
    assert path.read_bytes() == content


def test_missing_data_raises(tmp_path):
    with pytest.raises(DataError, match="no such file or folder, and no file matches"):
        load_corpus(str(tmp_path / "nothing"), 16)
    with pytest.raises(DataError, match="the folder holds no files"):
        load_corpus(str(tmp_path), 16)


def test_lm_batches_depend_only_on_seed_and_step(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(LINE * 200)
    task = LanguageModelling(load_corpus(str(path), 16), 4, 16, validation_batches=2)
    batch = task.batch(3, 5)
    torch.manual_seed(123)
    torch.testing.assert_close(task.batch(3, 5), batch)
    assert not torch.equal(task.batch(3, 6)["tokens"], batch["tokens"])
    assert not torch.equal(task.batch(4, 5)["tokens"], batch["tokens"])
    torch.testing.assert_close(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert [b["tokens"].shape for b in task.held_out()] == [(4, 16), (4, 16)]


MODELS = """
import torch
from torch import nn

def good():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

def fails():
    raise RuntimeError("no weights here")

def number():
    return 3

def empty():
    return nn.Identity()
"""


def test_user_model_is_built_with_the_seeds_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_models.py").write_text(MODELS)
    first, other = (build_model("users_models:good", {}, seed) for seed in (0, 1))
    again = build_model(f"{tmp_path}/users_models.py:good", {}, 0)
    torch.testing.assert_close(first.state_dict(), again.state_dict(), rtol=0, atol=0)
    assert not torch.equal(first[1].weight, other[1].weight)
    for function, message in [
        ("fails", "the function raised RuntimeError: no weights here"),
        ("number", "the function returned int; expected a torch.nn.Module"),
        ("empty", "the model has no parameters"),
        ("goood", "users_models: unknown function 'goood'; nearest: good"),
    ]:
        with pytest.raises(ModelError, match=message):
            build_model(f"users_models:{function}", {}, 0)


def test_unknown_models_and_modules_raise():
    with pytest.raises(ModelError, match=r"unknown model 'gpt-tin'; nearest: gpt-tiny.*module:function"):
        build_model("gpt-tin", {"gpt-tiny": nn.Identity}, 0)
    with pytest.raises(ModelError, match=r"no_such_module: cannot be imported \(ModuleNotFoundError"):
        build_model("no_such_module:f", {}, 0)


@pytest.mark.slow
def test_gpt_small_has_ten_million_parameters():
    known = LanguageModelling(load_corpus(None, 256), 1, 256).models()
    assert sum(p.numel() for p in build_model("gpt-small", known, 0).parameters()) == pytest.approx(10.9e6, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps = 0 given; expected a positive number"),
        ({"lr": float("nan")}, "lr = nan given; expected a positive number"),
        ({"margin": float("inf")}, "margin = inf given; expected a positive number"),
        ({"lr": -1.0}, r"lr = -1\.0 given"),
        ({"recipes": ()}, "no recipe given"),
        ({"recipes": ("fp32", "fp32")}, "named twice"),
    ],
)
def test_invalid_experiments_raise(changes, message):
    with pytest.raises(RunError, match=message):
        Experiment(**{"recipes": ("fp32",), **changes})


def test_schedule_warms_up_then_decays_above_zero():
    experiment = Experiment(recipes=("fp32",), steps=100, warmup=10, lr=1.0)
    rates = [experiment.learning_rate(step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == max(rates) == 1.0
    assert all(a > b > 0 for a, b in pairwise(rates[9:]))
    assert rates[-1] < 1e-3


@pytest.mark.parametrize("steps", [1, 7, 100])
@pytest.mark.parametrize("times", [1, 3, 10])
def test_due_steps_have_the_given_count_and_include_the_last(steps, times):
    experiment = Experiment(recipes=("fp32",), steps=steps)
    due = [step for step in range(1, steps + 1) if experiment.due(step, times)]
    assert len(due) == min(times, steps)
    assert due[-1] == steps


def test_runs_are_ordered_by_seed_with_more_baseline_seeds():
    runs = Experiment(recipes=("fp32", "bf16-mixed"), seeds=1, baseline_seeds=3).runs()
    assert runs == [("fp32", 0), ("bf16-mixed", 0), ("fp32", 1), ("fp32", 2)]
