"""Explanations of failed runs: planted causes are named, and without a cause none is."""

import math

import pytest
import torch
from torch import nn

from halfstep.lab.experiment import Experiment, read_metrics
from halfstep.lab.task import Task
from halfstep.lab.train import Trainer
from halfstep.lab.verdict import NOTHING, explain, judge
from halfstep.recipe import get_recipe


class Fit(Task):
    """Fit y = sin(3x); the loss, and with it every gradient, is divided by `unit`."""

    def __init__(self, unit=1.0):
        self.unit = unit

    def models(self):
        return {}

    def batch(self, seed, step):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.rand(64, 1, generator=generator) * 4 - 2
        return {"x": x, "y": torch.sin(3 * x)}

    def held_out(self):
        return [self.batch(77, 0)]

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["y"]).square().mean() / self.unit


class Tall(nn.Module):
    """A layer with activations multiplied by `factor`, followed by a division by it."""

    def __init__(self, factor=100.0):
        super().__init__()
        self.first, self.last = nn.Linear(1, 48), nn.Linear(48, 1)
        self.tall, self.factor = nn.Linear(48, 48), factor

    def forward(self, x):
        return self.last(torch.tanh(self.tall(self.factor * torch.tanh(self.first(x))) / self.factor))


def mlp():
    return nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))


def trained(folder, recipe, build=mlp, task=None, **fields):
    """The metrics rows of a run."""
    settings = {"steps": 64, "lr": 1e-2, "warmup": 4, "validations": 2, "checkpoints": 1, **fields}
    experiment = Experiment(recipes=(recipe,), **settings)

    def make(seed):
        torch.manual_seed(seed)
        return build()

    Trainer(experiment, get_recipe(recipe), 0, task or Fit(), make, folder / recipe).run()
    return read_metrics(folder / recipe / "metrics.jsonl")


def explained(folder, recipe, **fields):
    return explain(trained(folder, recipe, **fields))


def test_lost_updates_are_explained(tmp_path):
    """bf16 has 8 significant bits: an update of 1e-5 is lost on weights of 0.1."""
    words = explained(tmp_path, "bf16-nomaster", lr=1e-5)
    share, _, rest = words.partition("% of its updates changed no weight at step ")
    assert int(share) > 80
    assert "of what they were to do arrived, least in" in rest
    assert any(f" {name} " in rest for name, _ in mlp().named_parameters())
    same = explained(tmp_path / "more", "bf16-nomaster", lr=1e-1)
    assert "changed no weight" not in same  # large updates are not lost


@pytest.mark.quick("bf16-kahan")
@pytest.mark.parametrize("recipe", ["bf16-mixed", "bf16-master", "bf16-kahan", "bf16-stochastic"])
def test_masters_and_stochastic_rounding_lose_no_updates(recipe, tmp_path):
    assert explained(tmp_path, recipe, lr=1e-4) == NOTHING


def test_underflowing_second_moment_is_explained(tmp_path):
    """fp16's smallest value is 6e-8: squares of gradients below 1e-3, times 1 - beta2, underflow."""
    words = explained(tmp_path, "fp16-pure", task=Fit(unit=64.0), steps=8)
    assert words.startswith("at step 1, ")
    assert "% of exp_avg_sq was zero where the gradient was not, most in " in words
    assert "times the learning rate" in words


def test_underflowing_gradients_are_explained(tmp_path):
    """Activation gradients around 1e-8 underflow in fp16, except with a loss scale."""
    task = Fit(unit=2.0**16)
    words = explained(tmp_path, "fp16-mixed-unscaled", task=task)
    assert words.startswith("at step 1, ")
    assert "gradients were zero, " in words
    assert ", of the same weights in fp32 0%; most of the others in " in words
    assert explained(tmp_path / "scaled", "fp16-mixed", task=task) == NOTHING


def test_overflowing_activation_is_explained(tmp_path):
    """The activation is finite in fp32 but overflows fp16; its tensor, step and magnitude are named."""
    words = explained(tmp_path, "fp16-mixed-unscaled", build=lambda: Tall(3e5), lr=1e-3)
    assert "at step 1 the input of tall (Linear) comes to" in words or "output of tall (Linear) comes to" in words
    assert words.endswith("beyond fp16's largest, 65,504")
    assert NOTHING not in words


@pytest.mark.slow
def test_too_high_learning_rate_is_not_blamed_on_the_recipe(tmp_path):
    """bf16-mixed fails but loses nothing that fp32 keeps, so no cause is named. With tanh there would be one: bf16
    rounds values near 1 to 1, where the slope is zero."""

    def build():
        return nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 1))

    good = trained(tmp_path, "fp32", build=build)
    bad = trained(tmp_path, "bf16-mixed", build=build, lr=1.0)
    verdict = judge("bf16-mixed", {0: bad}, {0: good, 1: good})
    assert verdict.status == "degrades"
    assert verdict.explanation == NOTHING


def test_nonfinite_values_in_fp32_too_are_reported_as_such(tmp_path):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            return torch.log(self.layer(x) * 0 - 1)

    words = explained(tmp_path, "bf16-mixed", build=Broken)
    assert words == "at step 1 the output of the model (Broken) is not finite in fp32 either, from the same weights"


def test_matching_recipe_has_no_explanation(tmp_path):
    rows = trained(tmp_path, "fp32")
    assert judge("fp32", {0: rows}, {0: rows}).explanation is None


def test_significantly_worse_recipe_within_the_margin_is_explained(tmp_path):
    """The interval is above zero and contains the margin; one that also contains zero needs no explanation."""

    def ends(loss):
        return [{"kind": "validation", "step": 9, "loss": loss}, {"kind": "end", "step": 9, "status": "finished"}]

    fp32 = {seed: ends(1.0) for seed in range(3)}
    for gaps, words in (((0.009, 0.010, 0.011), NOTHING), ((-0.04, 0.010, 0.06), None)):
        verdict = judge("r", {seed: ends(1 + gap) for seed, gap in enumerate(gaps)}, fp32)
        assert (verdict.status, verdict.explanation) == ("cannot tell", words)


def test_explanation_without_range_rows_is_nothing():
    assert explain([]) == NOTHING


def test_ranges_are_recorded_at_powers_of_two_and_with_statistics(tmp_path):
    rows = trained(tmp_path, "bf16-mixed", steps=20, statistics=2)
    assert [row["step"] for row in rows if row["kind"] == "ranges"] == [1, 2, 4, 8, 10, 16, 20]
    assert [row["step"] for row in rows if row["kind"] == "statistics"] == [10, 20]
    assert [row["step"] for row in rows if "in_float32" in row] == [1, 2, 4, 8, 16]
    last = rows[[row["kind"] for row in rows].index("ranges")]
    names = {name for name, _ in mlp().named_parameters()}
    assert set(last["gradients"]) == set(last["states"]) == names
    assert set(last["activation_gradients"]) == {"0", "1", "2", "3", "4"}
    assert all(math.isfinite(value) and value > 0 for value in last["largest"].values())


def test_recording_ranges_changes_no_loss(tmp_path, monkeypatch):
    """Losses of a run with recorded ranges equal those of one without."""
    looked = trained(tmp_path / "a", "bf16-stochastic", steps=20)
    monkeypatch.setattr(Experiment, "due", lambda self, step, times: step == self.steps and times != self.statistics)
    unseen = trained(tmp_path / "b", "bf16-stochastic", steps=20, statistics=3)
    losses = [[row["loss"] for row in rows if row["kind"] == "step"] for rows in (looked, unseen)]
    assert losses[0] == losses[1]


def test_causes_are_ordered_by_first_step():
    """A state underflowing at step 2 is named before gradients underflowing at step 4."""

    def row(step, states, gradients, plain=0):
        counts = {"activation_gradients": {"a": [gradients, 10]}, "gradients": {}}
        fp32 = {"activation_gradients": {"a": [plain, 10]}, "gradients": {}}
        kinds = {"states": {"w": {"exp_avg_sq": [states, 10]}}, "largest": {"w": 3.0}}
        return {"kind": "ranges", "step": step, **counts, **kinds, "in_float32": fp32}

    assert explain([row(2, 5, 0), row(4, 5, 9)]).startswith("at step 2, 50% of exp_avg_sq was zero")
    words = "at step 4, 90% of the activations' gradients were zero, of the same weights in fp32 10%"
    assert explain([row(2, 0, 0), row(4, 0, 9, 1)]) == f"{words}; most of the others in a"
    assert explain([row(2, 0, 9, 9)]) == NOTHING  # zero in fp32, too
    bare = row(2, 0, 9)
    del bare["in_float32"]
    assert explain([bare]) == NOTHING  # unknown without fp32 rows


@pytest.mark.parametrize(("compute", "end"), [("fp16", ", beyond fp16's largest, 65,504"), ("bf16", "same weights")])
def test_overflow_is_named_only_for_fp16_compute(compute, end):
    row = {"kind": "diverged", "step": 7, "reason": "", "tensor": "output of a", "in_float32": 1e5, "compute": compute}
    assert explain([row]).endswith(end)
