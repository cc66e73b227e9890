"""An experiment's optimizer and learning rates, and that older experiments keep their keys."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from halfstep.errors import OptimizerError, RunError
from halfstep.lab.compare import open_experiment
from halfstep.lab.experiment import TIMINGS, Experiment
from halfstep.lab.optimizer import build_optimizer
from halfstep.lab.report import command, write_report
from halfstep.optim import Lamb, Lion, update_rules


SMALL = {"seeds": 1, "baseline_seeds": 1, "steps": 4, "batch": 2, "context": 16, "warmup": 1, "statistics": 1}
MODEL = "from torch import nn\ndef model():\n    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))\n"


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_models.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("some text to learn from\n" * 200)
    return {**SMALL, "data": "text.txt", "model": "small_models.py:model"}


def rows(comparison, recipe):
    found = comparison.folder.metrics(recipe, 0)
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in found]


def test_older_experiments_keep_their_keys():
    """The keys were computed before experiments had optimizers and learning rates per recipe."""
    assert Experiment(recipes=("fp32", "bf16-mixed")).key("digest", [1, 2]) == "bb22ee6aab3aca67"
    assert Experiment(recipes=("fp32",), task="vision", lr=0.5).key() == "b8a052dcfcb11424"
    assert not {"optimizer", "recipe_lr"} & Experiment(recipes=("fp32",)).to_dict().keys()
    other = Experiment(recipes=("fp32",), optimizer="sgd", recipe_lr={"fp32": 0.1})
    assert other.to_dict()["optimizer"] == "sgd"
    assert other.to_dict()["recipe_lr"] == {"fp32": 0.1}


def test_alone_has_the_recipes_learning_rate_and_key():
    together = Experiment(recipes=("fp32", "fp16-mixed"), recipe_lr={"fp16-mixed": 0.02})
    assert together.alone("fp16-mixed").learning_rate(30) == 0.02
    assert together.alone("fp32").learning_rate(30) == 1e-3
    assert together.alone("fp32").key() == Experiment(recipes=("fp32",)).key()
    assert together.alone("fp16-mixed").key() == Experiment(recipes=("fp16-mixed",), lr=0.02).key()
    keys = {Experiment(recipes=("fp32",), optimizer=name).key() for name in update_rules()}
    assert len(keys) == len(update_rules())


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
        ("adam", torch.optim.Adam, {"betas": (0.8, 0.9), "weight_decay": 0.0}),
        ("sgd", torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.0}),
        ("lion", Lion, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
        ("lamb", Lamb, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
    ],
)
def test_optimizers_are_built_from_the_experiments_fields(name, kind, expected):
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(Experiment(recipes=("fp32",), optimizer=name, betas=(0.8, 0.9), lr=0.5), model)
    assert type(optimizer) is kind
    matrices, vectors = optimizer.param_groups
    assert (matrices["params"], vectors["params"]) == ([model.weight], [model.bias])
    assert {option: matrices[option] for option in expected} == expected
    assert (matrices["lr"], vectors["weight_decay"]) == (0.5, 0.0)


@pytest.mark.quick("adagrad", "muon", "nadam", "rmsprop")
@pytest.mark.parametrize("name", sorted(update_rules()))
def test_every_optimizer_trains_and_resumes(name, given, tmp_path):
    experiment = Experiment(recipes=("fp32", "fp16-mixed"), optimizer=name, lr=0.03, **given)
    comparison = open_experiment(experiment, tmp_path / "run", resume=False)
    comparison.run()
    losses = [row["loss"] for row in rows(comparison, "fp16-mixed") if row["kind"] == "validation"]
    assert losses[-1] < losses[0]
    assert open_experiment(experiment, tmp_path / "run", resume=True).experiment == experiment
    with pytest.raises(RunError, match=f"its optimizer is '{name}', 'other' was asked for"):
        open_experiment(replace(experiment, optimizer="other"), tmp_path / "run", resume=True)


def test_optimizers_differ_and_sgd_equals_torch(given, tmp_path):
    final = {}
    for name in sorted(update_rules()):
        experiment = Experiment(recipes=("fp32",), optimizer=name, lr=0.03, clip=1e9, **given)
        comparison = open_experiment(experiment, tmp_path / name, resume=False)
        comparison.run()
        final[name] = rows(comparison, "fp32")[-2]["loss"]
    assert len(set(final.values())) == len(final)
    task = comparison.task
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    for step in range(1, 5):
        sgd.param_groups[0]["lr"] = experiment.learning_rate(step)
        task.loss(model, task.batch(0, step)).backward()
        sgd.step()
        sgd.zero_grad()
    with torch.no_grad():
        losses = [float(task.loss(model, batch)) for batch in task.held_out()]
    assert final["sgd"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.slow
def test_recipe_trains_with_its_own_learning_rate(given, tmp_path):
    both = Experiment(recipes=("fp32", "bf16-mixed"), recipe_lr={"bf16-mixed": 0.5}, **given)
    comparison = open_experiment(both, tmp_path / "both", resume=False)
    comparison.run()
    alone = Experiment(recipes=("bf16-mixed",), lr=0.5, **given)
    other = open_experiment(alone, tmp_path / "alone", resume=False)
    other.run()
    assert rows(comparison, "bf16-mixed") == rows(other, "bf16-mixed")
    assert max(row["lr"] for row in rows(comparison, "fp32") if row["kind"] == "step") == 1e-3
    page = write_report(comparison.folder).read_text()
    assert "learning rate<small>peak</small>" in page
    again = command(Experiment(recipes=both.recipes, recipe_lr=both.recipe_lr, optimizer="sgd"), tmp_path)
    assert "compare --recipes fp32,bf16-mixed --recipe-lr bf16-mixed=0.5 --optimizer sgd --out" in again
    summary = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert summary["learning_rates"] == {"fp32": 1e-3, "bf16-mixed": 0.5}
    with pytest.raises(RunError, match=r"its recipe_lr is \{'bf16-mixed': 0.5\}, \{\} was asked for"):
        open_experiment(replace(both, recipe_lr={}), tmp_path / "both", resume=True)


def test_baseline_is_reused_only_for_equal_optimizer_and_rate(given, tmp_path):
    first = open_experiment(Experiment(recipes=("fp32",), **given), tmp_path / "one", resume=False)
    first.run()
    changes = {
        "same": ({"recipe_lr": {"bf16-mixed": 0.5}}, True),
        "faster": ({"lr": 0.5}, False),
        "other": ({"optimizer": "sgd"}, False),
    }
    for name, (changed, taken) in changes.items():
        more = open_experiment(Experiment(recipes=("bf16-mixed",), **given, **changed), tmp_path / name, resume=False)
        more.run()
        assert (rows(more, "fp32") == rows(first, "fp32")) == taken, name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "adamx"}, r"unknown optimizer 'adamx'; nearest: adam"),
        ({"recipe_lr": {"fp32": 0.0}}, r"a learning rate of 0.0 given for recipe 'fp32'; expected a positive number"),
        ({"recipe_lr": {"fp32": float("nan")}}, r"a learning rate of nan given"),
        ({"recipe_lr": {"fp23": 0.1}}, r"takes no part: unknown recipe 'fp23'; nearest: fp32"),
        ({"recipe_lr": {"fp16-mixed": 0.1}}, r"takes no part: unknown recipe 'fp16-mixed'.* Known: fp32"),
    ],
)
def test_invalid_experiments_raise_before_writing(given, tmp_path, fields, message):
    with pytest.raises(RunError, match=message):
        open_experiment(Experiment(recipes=("fp32",), **given, **fields), tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


def test_optimizer_unsupported_by_a_recipe_raises_before_writing(given, tmp_path):
    experiment = Experiment(recipes=("fp32", "galore"), optimizer="lion", **given)
    with pytest.raises(OptimizerError, match="lion"):
        open_experiment(experiment, tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


RECIPE = 'name = "mine"\ncompute = "bf16"\n'


@pytest.mark.slow
def test_optimizer_and_recipe_lr_options(given, run, tmp_path, unrendered):
    (tmp_path / "mine.toml").write_text(RECIPE)
    options = ["--data", "text.txt", "--model", "small_models.py:model", "--steps", "3", "--batch", "2"]
    options += ["--context", "16", "--seeds", "1", "--baseline-seeds", "1", "--optimizer", "sgd", "--lr", "0.1"]
    asked = ["--recipes", "fp32,mine.toml", *options, "--recipe-lr", "mine.toml=0.2"]
    asked += ["--recipe-lr", "fp32=0.05", "--out", "x"]
    code, out, error = run("compare", *asked)
    assert code == 0, error
    assert re.search(r"peak.*\n.* lr ", out)
    assert re.search(r"mine .* 0\.2 ", out)
    written = json.loads((tmp_path / "x" / "experiment.json").read_text())["experiment"]
    assert (written["optimizer"], written["recipe_lr"]) == ("sgd", {"mine": 0.2, "fp32": 0.05})
    assert run("compare", *asked, "--resume")[0] == 0
    assert run("compare", "--out", "x", "--resume")[0] == 0
    code, _, error = run("compare", "--out", "x", "--resume", "--optimizer", "adam")
    assert (code, "its optimizer is 'sgd', 'adam' was asked for" in " ".join(error.split())) == (2, True)


def test_help_names_every_optimizer(run):
    _, out, _ = run("compare", "--help")
    assert all(re.search(rf"\b{name}\b", out) for name in update_rules())


@pytest.mark.quick("fp32=fast", "fp32=0.1,fp32=0.2")
@pytest.mark.parametrize("text", ["fp32", "fp32=fast", "fp32=0.1,fp32=0.2", "=0.1"])
def test_malformed_recipe_learning_rates_exit_2(run, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    code, _, error = run("compare", "--recipes", "fp32", "--recipe-lr", text)
    assert code == 2
    assert f"--recipe-lr {text}: found '" in " ".join(error.split())
    assert "expected each recipe once with its learning rate" in " ".join(error.split())


def test_two_learning_rates_for_one_recipe_raise():
    experiment = Experiment(recipes=("mine.toml",), recipe_lr={"mine.toml": 0.1, "mine": 0.2})
    with pytest.raises(RunError, match=r"recipe 'mine' was given two learning rates, 0.1 and 0.2; give one"):
        experiment.named({"mine.toml": "mine"})
