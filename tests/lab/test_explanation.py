"""What is said of runs that failed: planted causes are found and named, and where there is none, none is named."""

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
    """Fit y = sin(3x) in `unit`s: what the loss is divided by, its gradients are."""

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
    """A layer that makes activations of 100 times their size, and one that makes them small again."""

    def __init__(self, factor=100.0):
        super().__init__()
        self.first, self.last = nn.Linear(1, 48), nn.Linear(48, 1)
        self.tall, self.factor = nn.Linear(48, 48), factor

    def forward(self, x):
        return self.last(torch.tanh(self.tall(self.factor * torch.tanh(self.first(x))) / self.factor))


def mlp():
    return nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))


def trained(folder, recipe, build=mlp, task=None, **fields):
    """The rows of a run."""
    settings = {"steps": 64, "lr": 1e-2, "warmup": 4, "validations": 2, "checkpoints": 1, **fields}
    experiment = Experiment(recipes=(recipe,), **settings)

    def make(seed):
        torch.manual_seed(seed)
        return build()

    Trainer(experiment, get_recipe(recipe), 0, task or Fit(), make, folder / recipe).run()
    return read_metrics(folder / recipe / "metrics.jsonl")


def explained(folder, recipe, **fields):
    return explain(trained(folder, recipe, **fields))


def test_updates_that_a_small_learning_rate_loses(tmp_path):
    """bf16 keeps 8 bits: an update of 1e-5 is lost on weights of 0.1."""
    words = explained(tmp_path, "bf16-nomaster", lr=1e-5)
    share, _, rest = words.partition("% of its updates changed no weight at step ")
    assert int(share) > 80
    assert "of what they were to do arrived, least in" in rest
    assert any(f" {name} " in rest for name, _ in mlp().named_parameters())
    same = explained(tmp_path / "more", "bf16-nomaster", lr=1e-1)
    assert "changed no weight" not in same  # large ones arrive


@pytest.mark.quick("bf16-kahan")
@pytest.mark.parametrize("recipe", ["bf16-mixed", "bf16-master", "bf16-kahan", "bf16-stochastic"])
def test_recipes_that_keep_what_is_rounded_away_lose_none(recipe, tmp_path):
    assert explained(tmp_path, recipe, lr=1e-4) == NOTHING


def test_a_second_moment_that_underflows(tmp_path):
    """fp16 ends at 6e-8: the squares of gradients below 1e-3, times 1 - beta2, vanish in it."""
    words = explained(tmp_path, "fp16-pure", task=Fit(unit=64.0), steps=8)
    assert words.startswith("at step 1, ")
    assert "% of exp_avg_sq was zero where the gradient was not, most in " in words
    assert "times the learning rate" in words


def test_gradients_that_underflow_without_a_loss_scale(tmp_path):
    """Activations' gradients around 1e-8 are zero in fp16; times a loss scale they are not."""
    task = Fit(unit=2.0**16)
    words = explained(tmp_path, "fp16-mixed-unscaled", task=task)
    assert words.startswith("at step 1, ")
    assert "gradients were zero, " in words
    assert ", of the same weights in fp32 0%; most of the others in " in words
    assert explained(tmp_path / "scaled", "fp16-mixed", task=task) == NOTHING


def test_an_activation_that_overflows(tmp_path):
    """It is finite in fp32, and beyond fp16: the tensor, the step and its size are named."""
    words = explained(tmp_path, "fp16-mixed-unscaled", build=lambda: Tall(3e5), lr=1e-3)
    assert "at step 1 the input of tall (Linear) comes to" in words or "output of tall (Linear) comes to" in words
    assert words.endswith("beyond fp16's largest, 65,504")
    assert NOTHING not in words


@pytest.mark.slow
def test_a_wrong_learning_rate_is_no_cause_of_the_recipes(tmp_path):
    """bf16-mixed fails with it, and loses nothing that fp32 keeps: nothing is named. Of tanh it would be: bf16
    rounds what is almost 1 to 1, where its slope is zero."""

    def build():
        return nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 1))

    good = trained(tmp_path, "fp32", build=build)
    bad = trained(tmp_path, "bf16-mixed", build=build, lr=1.0)
    verdict = judge("bf16-mixed", {0: bad}, {0: good, 1: good})
    assert verdict.status == "degrades"
    assert verdict.explanation == NOTHING


def test_what_is_not_finite_in_fp32_either_is_said_to_be_so(tmp_path):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            return torch.log(self.layer(x) * 0 - 1)

    words = explained(tmp_path, "bf16-mixed", build=Broken)
    assert words == "at step 1 the output of the model (Broken) is not finite in fp32 either, from the same weights"


def test_a_recipe_that_matches_is_not_explained(tmp_path):
    rows = trained(tmp_path, "fp32")
    assert judge("fp32", {0: rows}, {0: rows}).explanation is None


def test_one_that_is_worse_beyond_doubt_is_explained_before_the_margin_is(tmp_path):
    """The interval lies above zero and holds the margin; where it holds zero too there is nothing to explain."""

    def ends(loss):
        return [{"kind": "validation", "step": 9, "loss": loss}, {"kind": "end", "step": 9, "status": "finished"}]

    fp32 = {seed: ends(1.0) for seed in range(3)}
    for gaps, words in (((0.009, 0.010, 0.011), NOTHING), ((-0.04, 0.010, 0.06), None)):
        verdict = judge("r", {seed: ends(1 + gap) for seed, gap in enumerate(gaps)}, fp32)
        assert (verdict.status, verdict.explanation) == ("cannot tell", words)


def test_folders_without_rows_of_ranges_say_that_nothing_was_found():
    assert explain([]) == NOTHING


def test_ranges_are_looked_at_at_powers_of_two_and_with_the_statistics(tmp_path):
    rows = trained(tmp_path, "bf16-mixed", steps=20, statistics=2)
    assert [row["step"] for row in rows if row["kind"] == "ranges"] == [1, 2, 4, 8, 10, 16, 20]
    assert [row["step"] for row in rows if row["kind"] == "statistics"] == [10, 20]
    assert [row["step"] for row in rows if "in_float32" in row] == [1, 2, 4, 8, 16]
    last = rows[[row["kind"] for row in rows].index("ranges")]
    names = {name for name, _ in mlp().named_parameters()}
    assert set(last["gradients"]) == set(last["states"]) == names
    assert set(last["activation_gradients"]) == {"0", "1", "2", "3", "4"}
    assert all(math.isfinite(value) and value > 0 for value in last["largest"].values())


def test_looking_moves_no_number(tmp_path, monkeypatch):
    """The losses of a run that is looked at are those of one that is not."""
    looked = trained(tmp_path / "a", "bf16-stochastic", steps=20)
    monkeypatch.setattr(Experiment, "due", lambda self, step, times: step == self.steps and times != self.statistics)
    unseen = trained(tmp_path / "b", "bf16-stochastic", steps=20, statistics=3)
    losses = [[row["loss"] for row in rows if row["kind"] == "step"] for rows in (looked, unseen)]
    assert losses[0] == losses[1]


def test_the_order_is_by_the_first_step():
    """A state that is zero at step 2 comes before gradients that are zero at step 4."""

    def row(step, states, gradients, plain=0):
        counts = {"activation_gradients": {"a": [gradients, 10]}, "gradients": {}}
        fp32 = {"activation_gradients": {"a": [plain, 10]}, "gradients": {}}
        kinds = {"states": {"w": {"exp_avg_sq": [states, 10]}}, "largest": {"w": 3.0}}
        return {"kind": "ranges", "step": step, **counts, **kinds, "in_float32": fp32}

    assert explain([row(2, 5, 0), row(4, 5, 9)]).startswith("at step 2, 50% of exp_avg_sq was zero")
    words = "at step 4, 90% of the activations' gradients were zero, of the same weights in fp32 10%"
    assert explain([row(2, 0, 0), row(4, 0, 9, 1)]) == f"{words}; most of the others in a"
    assert explain([row(2, 0, 9, 9)]) == NOTHING  # zero by right
    bare = row(2, 0, 9)
    del bare["in_float32"]
    assert explain([bare]) == NOTHING  # it cannot be told


@pytest.mark.parametrize(("compute", "end"), [("fp16", ", beyond fp16's largest, 65,504"), ("bf16", "same weights")])
def test_only_what_computes_in_fp16_is_measured_by_its_largest(compute, end):
    row = {"kind": "diverged", "step": 7, "reason": "", "tensor": "output of a", "in_float32": 1e5, "compute": compute}
    assert explain([row]).endswith(end)
