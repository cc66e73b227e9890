"""Training runs are repeatable, resume bit for bit, and report what breaks."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from families import slow_unless
from halfstep.errors import CheckpointError, DataError, ModelError
from halfstep.formats import ieee
from halfstep.lab.compare import open_experiment
from halfstep.lab.experiment import TIMINGS, Experiment, read_metrics
from halfstep.lab.task import Task, load_corpus
from halfstep.lab.tasks.lm import LanguageModelling
from halfstep.lab.train import Trainer, last_step as last_checkpoint
from halfstep.lab.verdict import DEGRADES, DIVERGED, MATCHES, final, judge
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, get_recipe
from tiny import RECIPES


TEXT = "".join(f"{a} plus {b} is {a + b}.\n" for a in range(60) for b in range(60))
SMALL = {
    "seeds": 1,
    "steps": 12,
    "batch": 4,
    "context": 16,
    "warmup": 2,
    "validations": 3,
    "statistics": 2,
    "checkpoints": 4,
}


class TinyModel(nn.Module):
    """Bytes to logits; with dropout, so that the random state matters, and NaN from step `spoil_after` on."""

    def __init__(self, spoil_after: int | None = None, width: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.inner = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.1)
        self.spoiled = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 256)
        self.left = spoil_after

    def forward(self, tokens):
        x = self.drop(torch.tanh(self.inner(self.token(tokens))))
        x = self.spoiled(x)
        if self.left is not None and self.training:
            self.left -= 1
            x = x * float("nan") if self.left < 0 else x
        return self.head(torch.tanh(x))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.txt"
    path.write_text(TEXT)
    return path


def train(folder: Path, recipe: Recipe, corpus: Path, build=lambda: TinyModel(), seed: int = 0, **changes):
    experiment = Experiment(recipes=(recipe.name,), **{**SMALL, **changes})
    task = LanguageModelling(load_corpus(str(corpus), experiment.context), experiment.batch, experiment.context, 2)

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build()

    Trainer(experiment, recipe, seed, task, make, folder).run()
    return without_timings(read_metrics(folder / "metrics.jsonl"))


def without_timings(rows):
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in rows]


STAGED = "fp8-delayed until 50%, then bf16-mixed"
"""Changes its recipe after 6 of SMALL's 12 steps."""


STATES = {
    "fp32",
    "fp16-mixed",
    "bf16-stochastic",
    "fp8lm-o3",
}
"""One recipe per kind of saved state; the optimizers' own tests resume all of them outside a run."""


@pytest.mark.quick("fp8-delayed until 50%, then bf16-mixed")
@pytest.mark.parametrize("name", [*slow_unless(STATES.__contains__, RECIPES), STAGED])
def test_resumed_run_equals_the_uninterrupted_one(name, tmp_path, corpus, monkeypatch):
    assert_resumed_run_equals_uninterrupted(
        name, random.Random(name).randrange(1, SMALL["steps"]), tmp_path, corpus, monkeypatch
    )


@pytest.mark.slow
@pytest.mark.quick("6")
@pytest.mark.parametrize("stop", slow_unless((6, 7).__contains__, [5, 6, 7, 8, 11]))
def test_run_resumed_around_a_stage_change_equals_the_uninterrupted_one(stop, tmp_path, corpus, monkeypatch):
    assert_resumed_run_equals_uninterrupted(
        "bf16-mixed until 50%, then fp8-delayed", stop, tmp_path, corpus, monkeypatch
    )


def assert_resumed_run_equals_uninterrupted(name, stop, tmp_path, corpus, monkeypatch):
    recipe = get_recipe(name)
    whole = train(tmp_path / "whole", recipe, corpus)
    original = Trainer._step

    def dies(self, step):
        if step == stop:
            raise KeyboardInterrupt
        return original(self, step)

    monkeypatch.setattr(Trainer, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", recipe, corpus)
    monkeypatch.setattr(Trainer, "_step", original)
    torch.manual_seed(99)
    assert train(tmp_path / "cut", recipe, corpus) == whole
    assert {row["kind"] for row in whole} >= {"memory", "step", "validation", "statistics", "end"}


def test_gradient_statistics_are_of_values_not_codes(tmp_path, corpus):
    rows = {name: train(tmp_path / name, get_recipe(name), corpus) for name in ("fp8-current", "fp8lm-o1")}
    largest = {
        name: max(int(e) for row in found if row["kind"] == "statistics" for e in row["gradients"]["counts"])
        for name, found in rows.items()
    }
    assert abs(largest["fp8lm-o1"] - largest["fp8-current"]) <= 1
    assert largest["fp8lm-o1"] < 0  # codes reach 448


@pytest.mark.slow
def test_seeds_differ_and_repeat(tmp_path, corpus):
    recipe = get_recipe("bf16-stochastic")
    first, again = (train(tmp_path / n, recipe, corpus) for n in "ab")
    assert first == again
    assert train(tmp_path / "c", recipe, corpus, seed=1) != first


def test_finished_run_is_not_run_again(tmp_path, corpus):
    recipe = get_recipe("fp32")
    rows = train(tmp_path, recipe, corpus)
    stamp = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert train(tmp_path, recipe, corpus) == rows
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == stamp


@pytest.mark.slow
def test_recipes_start_from_the_same_weights(tmp_path, corpus):
    start = {n: train(tmp_path / n, get_recipe(n), corpus)[0] for n in ("fp32", "bf16-mixed", "fp16-master")}
    assert all(row["kind"] == "validation" and row["step"] == 0 for row in start.values())
    losses = [row["loss"] for row in start.values()]
    assert max(losses) - min(losses) < 1e-2


def test_planted_nan_activation_is_named_as_divergence(tmp_path, corpus):
    rows = train(tmp_path, get_recipe("bf16-mixed"), corpus, lambda: TinyModel(spoil_after=5))
    verdict = judge("bf16-mixed", {0: read_metrics(tmp_path / "metrics.jsonl")}, {})
    assert (verdict.status, verdict.diverged_at) == (DIVERGED, 6)
    assert verdict.first_nonfinite == "input of head (Linear)"
    assert rows[-1] == {"kind": "end", "step": 6, "status": "diverged"}
    assert verdict.final_loss is None


def test_planted_nan_weight_is_named_as_divergence(tmp_path, corpus, monkeypatch):
    original = Trainer._step

    def spoils(self, step):
        if step == 4:
            with torch.no_grad():
                self.training.model.spoiled.weight[0, 0] = float("nan")
        return original(self, step)

    monkeypatch.setattr(Trainer, "_step", spoils)
    rows = train(tmp_path, get_recipe("fp32"), corpus)
    assert rows[-2]["kind"] == "diverged"
    assert rows[-2]["tensor"] == "weight spoiled.weight"


def test_persistent_nan_ends_at_the_loss_scale_floor(tmp_path, corpus):
    with pytest.warns(UserWarning, match="20 steps in a row were skipped"):
        rows = train(tmp_path, get_recipe("fp16-mixed"), corpus, lambda: TinyModel(spoil_after=3), steps=60)
    assert rows[-2]["kind"] == "diverged"
    assert "floor" in rows[-2]["reason"]
    assert rows[-2]["tensor"] == "input of head (Linear)"
    assert sum(row.get("skipped", False) for row in rows) == 32


class Curve(Task):
    """Fit y = sin(3x), where the matmuls' precision limits the loss."""

    def models(self):
        return {}

    def batch(self, seed, step):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.rand(64, 1, generator=generator) * 4 - 2
        return {"x": x, "y": torch.sin(3 * x)}

    def held_out(self):
        return [self.batch(77, 0)]

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["y"]).square().mean()


def multilayer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))


@pytest.mark.slow
def test_three_mantissa_bits_degrade_and_fp16_mixed_matches(tmp_path):
    """A verdict distinguishes a bad recipe from a good one over the same seeds."""
    three = Quantizer(ieee("e8m3", 8, 3, "made up"))
    both = Matmul(three, three)
    coarse = Recipe("coarse", "3 mantissa bits", "a test", rules=(Rule("*", LinearSpec(both, both, both)),))
    runs: dict[str, dict[int, list]] = {}
    for recipe in (get_recipe("fp32"), get_recipe("fp16-mixed"), coarse):
        experiment = Experiment(recipes=(recipe.name,), steps=300, lr=2e-2, warmup=5, statistics=1, checkpoints=1)
        for seed in range(6):
            folder = tmp_path / recipe.name / str(seed)
            Trainer(experiment, recipe, seed, Curve(), multilayer, folder).run()
            runs.setdefault(recipe.name, {})[seed] = read_metrics(folder / "metrics.jsonl")
    verdicts = {name: judge(name, rows, runs["fp32"], margin=0.1) for name, rows in runs.items()}
    assert verdicts["fp32"].status == MATCHES
    assert verdicts["fp16-mixed"].status == MATCHES
    assert verdicts["coarse"].status == DEGRADES
    assert verdicts["coarse"].paired_gap > 0.5


# ---- kill -9 ----------------------------------------------------------------------------------------------------


CHANGES = 60
LATE = "bf16-mixed until 50% then fp8-delayed"
KILLED = {"fp32,fp16-mixed,bf16-stochastic": 200, ",".join(RECIPES): 30, STAGED: 2 * CHANGES, LATE: 2 * CHANGES}
"""Recipes and their numbers of steps."""


def command(recipes: str, out: Path, corpus: Path, *more: str) -> list[str]:
    options = ["--recipes", recipes, "--steps", str(KILLED[recipes]), "--batch", "4", "--context", "16"]
    paths = ["--data", str(corpus), "--out", str(out), "--seeds", "1", "--baseline-seeds", "1"]
    return [sys.executable, "-m", "halfstep", "compare", *options, *paths, *more]


def all_rows(out: Path):
    return {str(p.relative_to(out)): without_timings(read_metrics(p)) for p in sorted(out.rglob("metrics.jsonl"))}


@pytest.mark.slow
@pytest.mark.parametrize("recipes", [*KILLED][:2], ids=["long", "every recipe"])
def test_run_killed_ten_times_equals_the_uninterrupted_run(tmp_path, corpus, recipes):
    whole, cut = tmp_path / "a" / "whole", tmp_path / "b" / "cut"
    subprocess.run(command(recipes, whole, corpus), check=True, capture_output=True)
    chance = random.Random(0)
    kills = 0
    while kills < 10:
        resume = ["--resume"] if (cut / "experiment.json").exists() else []
        process = subprocess.Popen(
            command(recipes, cut, corpus, *resume), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        before = sum(len(p.read_bytes()) for p in cut.rglob("metrics.jsonl"))
        deadline = time.monotonic() + 120  # wait until it writes, then let it run for a random time
        while process.poll() is None and time.monotonic() < deadline:
            if sum(len(p.read_bytes()) for p in cut.rglob("metrics.jsonl")) != before:
                break
            time.sleep(0.01)
        time.sleep(chance.random() * 0.8)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
        if all_rows(cut) and all(rows and rows[-1]["kind"] == "end" for rows in all_rows(cut).values()):
            break
    subprocess.run(command(recipes, cut, corpus, "--resume"), check=True, capture_output=True)
    assert kills == 10
    assert all_rows(cut) == all_rows(whole)


@pytest.mark.slow
@pytest.mark.parametrize("recipes", [STAGED, LATE])
def test_run_killed_around_a_stage_change_equals_the_uninterrupted_run(tmp_path, corpus, recipes):
    whole, cut = tmp_path / "a" / "whole", tmp_path / "b" / "cut"
    subprocess.run(command(recipes, whole, corpus), check=True, capture_output=True)
    for after in (CHANGES // 3, CHANGES + CHANGES // 3):
        resume = ["--resume"] if cut.exists() else []
        process = subprocess.Popen(command(recipes, cut, corpus, *resume), stdout=subprocess.DEVNULL)
        while process.poll() is None and last_step(cut) < after:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert after <= last_step(cut) < after + CHANGES // 2
    subprocess.run(command(recipes, cut, corpus, "--resume"), check=True, capture_output=True)
    assert all_rows(cut) == all_rows(whole)


def last_step(out: Path) -> int:
    """The last step with a complete row."""
    text = "".join(path.read_text() for path in out.rglob("metrics.jsonl"))
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return max((row["step"] for row in rows), default=0)


# ---- checkpoints that cannot be used ----------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path, corpus, monkeypatch):
    """The last checkpoint of a run stopped before its end, and a function that resumes the run."""
    original = Trainer._step

    def dies(self, step):
        if step == 11:
            raise KeyboardInterrupt
        return original(self, step)

    monkeypatch.setattr(Trainer, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, get_recipe("fp16-master"), corpus)
    monkeypatch.setattr(Trainer, "_step", original)
    folder = tmp_path / "checkpoints"
    latest = folder / f"step-{last_checkpoint(folder):08d}"
    return latest, lambda: train(tmp_path, get_recipe("fp16-master"), corpus)


@pytest.mark.quick("<lambda>1-model.safetensors", "<lambda>1-optimizer.safetensors")
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: b""])
def test_truncated_or_edited_tensor_file_raises(stopped, name, damage):
    latest, resume = stopped
    data = (latest / name).read_bytes()
    (latest / name).write_bytes(damage(data))
    with pytest.raises(CheckpointError, match=rf"{name} is truncated or was edited.*remove that folder"):
        resume()
    assert (latest / name).read_bytes() == damage(data)


def test_edited_or_broken_state_file_raises(stopped):
    latest, resume = stopped
    state = json.loads((latest / "state.json").read_text())
    state["content"]["scaler"]["scale"] = 1.0
    (latest / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"state\.json was edited"):
        resume()
    (latest / "state.json").write_text('{"content": ')
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        resume()


def test_resume_uses_the_previous_checkpoint_if_the_last_is_removed(stopped, tmp_path, corpus):
    latest, resume = stopped
    for file in latest.iterdir():
        file.unlink()
    latest.rmdir()
    assert resume() == train(tmp_path / "whole", get_recipe("fp16-master"), corpus)


def test_checkpoint_of_another_model_raises(stopped, tmp_path, corpus):
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        train(tmp_path, get_recipe("fp16-master"), corpus, lambda: TinyModel(width=8))


# ---- data and models that cannot be used ------------------------------------------------------------------------


def test_nan_in_the_data_raises_a_data_error(tmp_path, corpus):
    class Regression(Task):
        """Float inputs, with a NaN at step 3."""

        def models(self):
            return {}

        def batch(self, seed, step):
            x = torch.ones(4, 2)
            x[2, 1] = float("nan") if step == 3 else 1.0
            return {"inputs": x}

        def held_out(self):
            return [self.batch(0, 1)]

        def loss(self, model, batch):
            return model(batch["inputs"]).square().mean()

    experiment = Experiment(recipes=("fp32",), **SMALL)
    trainer = Trainer(experiment, get_recipe("fp32"), 0, Regression(), lambda seed: nn.Linear(2, 1), tmp_path)
    with pytest.raises(DataError, match=r"step 3: the batch's 'inputs' holds nan at \[2, 1\]"):
        trainer.run()
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 2


def test_model_with_wrong_output_shape_raises(tmp_path, corpus):
    with pytest.raises(ModelError, match=r"returned \(4, 16, 8\); expected logits of shape \(4, 16, 256\)"):
        train(tmp_path, get_recipe("fp32"), corpus, lambda: nn.Embedding(256, 8))


@pytest.mark.slow
def test_comparison_takes_user_recipes_and_reuses_the_baseline(tmp_path, corpus):
    options = {**SMALL, "baseline_seeds": 1, "data": str(corpus)}
    first = open_experiment(Experiment(recipes=("fp32",), **options), tmp_path / "one", resume=False)
    first.run()
    mine = Recipe("mine", "bf16 products", "a test", compute="bf16")
    second = open_experiment(Experiment(recipes=("mine",), **options), tmp_path / "two", False, {"mine": mine})
    second.run()
    taken, trained = second.folder.metrics("fp32", 0), first.folder.metrics("fp32", 0)
    assert without_timings(taken) == without_timings(trained)
    assert {row["seconds"] for row in taken if row["kind"] == "step"} == {None}  # copied runs have no timings
    assert final(second.folder.metrics("mine", 0)) is not None
