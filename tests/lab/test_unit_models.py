"""Models made of unit-scaled layers train in the lab with their own learning rates and are not scaled again."""

import pytest
import torch

from halfstep.lab.experiment import read_metrics
from halfstep.lab.models import build_model
from halfstep.lab.optimizer import build_optimizer
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.lab.train import Trainer
from halfstep.recipe import get_recipe


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return str(tmp_path / "text.txt")


def opened(corpus, model, recipe):
    options = {"batch": 2, "context": 16, "lr": 0.25, "warmup": 2, "validations": 1, "statistics": 1, "checkpoints": 1}
    experiment = experiment_for("lm", recipes=(recipe,), model=model, data=corpus, steps=4, seeds=1, **options)
    return experiment, get_task("lm").open(experiment)


@pytest.mark.quick("unit-gpt-tiny-umup-fp8")
@pytest.mark.parametrize(("model", "recipe"), [("unit-gpt-tiny", "umup-fp8"), ("munit-gpt-tiny", "munit-fp8")])
def test_unit_gpt_trains_in_the_lab(model, recipe, corpus, tmp_path):
    experiment, task = opened(corpus, model, recipe)
    trainer = Trainer(
        experiment, get_recipe(recipe), 0, task, lambda seed: build_model(model, task.models(), seed), tmp_path / "run"
    )
    trainer.run()
    groups = trainer.training.optimizer.param_groups
    last = experiment.learning_rate(4)
    assert sorted({group["lr"] / last for group in groups}) == pytest.approx(sorted({g["factor"] for g in groups}))
    assert len({group["factor"] for group in groups}) >= 3
    losses = [
        row["loss"]
        for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if row.get("kind") == "step" or "loss" in row
    ]
    assert losses[-1] < losses[0]


def test_learning_rates_follow_the_parametrization(corpus):
    experiment, task = opened(corpus, "unit-gpt-tiny", "fp32")
    torch.manual_seed(0)
    model = build_model("unit-gpt-tiny", task.models(), 0)
    groups = build_optimizer(experiment, model).param_groups
    rate = {p: g["factor"] for g in groups for p in g["params"]}
    assert rate[model.head.weight] == 1.0
    assert rate[model.token.weight] == pytest.approx(128**-0.5)
    assert rate[model.blocks[0].attention.qkv.weight] == pytest.approx(256**-0.5)


def test_other_models_have_one_learning_rate(corpus):
    experiment, task = opened(corpus, "gpt-tiny", "fp32")
    groups = build_optimizer(experiment, build_model("gpt-tiny", task.models(), 0)).param_groups
    assert all("factor" not in group for group in groups)
