"""`halfstep compare` and `halfstep train`, run through the command line."""

import errno
import json
import re
import shutil
import sys
from dataclasses import dataclass

import pytest

from halfstep.cli.app import main


pytestmark = pytest.mark.usefixtures("unrendered")  # reports are rendered in lab/test_llama.py
SMALL = ["--seeds", "1", "--steps", "6", "--batch", "2", "--context", "16", "--model", "tiny_models:model"]
MODEL = """
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

def other():
    return nn.Linear(8, 256)

class Fails(nn.Sequential):
    trained, training_only = 0, False

    def forward(self, x):
        self.trained += self.training
        if self.trained > 3 or (self.training_only and not self.training):
            raise RuntimeError("it is too late")
        return super().forward(x)

def late():
    return Fails(nn.Embedding(256, 8), nn.Linear(8, 256))

class TrainsOnly(Fails):
    training_only = True

def trains_only():
    return TrainsOnly(nn.Embedding(256, 8), nn.Linear(8, 256))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "tiny_models.py").write_text(MODEL)
    (folder / "text.txt").write_text("some text to learn from\n" * 200)
    return folder


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        return " ".join(self.stderr.split())


@pytest.fixture
def halfstep(place, monkeypatch, capsys):
    """A function that runs the command in this process, from the folder `place`."""
    monkeypatch.chdir(place)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["halfstep", *arguments])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def test_compare_trains_reports_and_resumes_to_equal_results(place, halfstep):
    options = ["--recipes", "fp32,bf16-mixed", "--data", "text.txt", "--out", "runs/a", "--baseline-seeds", "1", *SMALL]
    first = halfstep("compare", *options, "--json")
    assert first.code == 0, first.stderr
    summary = json.loads(first.stdout)
    assert [v["recipe"] for v in summary["verdicts"]] == ["fp32", "bf16-mixed"]
    assert {v["recipe"]: v["status"] for v in summary["verdicts"]} == {"fp32": "matches", "bf16-mixed": "cannot tell"}
    run = place / "runs" / "a"
    for name in ("experiment.json", "environment.json", "summary.json", "report.html", "fp32/seed-0/metrics.jsonl"):
        assert (run / name).is_file(), name
    assert list(run.glob("plots/*.png"))
    assert list(run.glob("fp32/seed-0/tensorboard/events*"))
    assert list(run.glob("fp32/seed-0/checkpoints/*/model.safetensors"))
    assert not [p for p in run.rglob("*") if p.suffix in (".pt", ".pkl", ".bin")]

    assert halfstep("compare", *options).code == 2  # the folder is taken
    again = halfstep("compare", *options, "--resume", "--json")
    assert json.loads(again.stdout)["verdicts"] == summary["verdicts"]

    more = [*options, "--resume", "--seeds", "2"]  # the last of two --seeds counts
    wider = json.loads(halfstep("compare", *more, "--json").stdout)
    assert [(v["seeds"], list(v["finals"])) for v in wider["verdicts"]] == [(2, ["0", "1"])] * 2
    assert [v["finals"]["0"] for v in wider["verdicts"]] == [v["finals"]["0"] for v in summary["verdicts"]]
    assert json.loads((run / "experiment.json").read_text())["experiment"]["seeds"] == 2
    fewer = halfstep("compare", *options, "--resume")
    assert (fewer.code, "its seeds is 2, 1 was asked for" in fewer.message) == (2, True)
    options += ["--seeds", "2"]

    other = halfstep("compare", *options, "--resume", "--margin", "0.5")
    assert (other.code, "another experiment: its margin is 0.01, 0.5" in other.message) == (2, True)
    other = halfstep("compare", *options, "--resume", "--lr", "0.5")
    assert other.code == 2
    assert "another experiment: its lr is 0.001, 0.5 was asked for" in other.message


def test_train_names_its_folder_and_prints_a_table(place, halfstep):
    done = halfstep("train", "--recipe", "bf16-stochastic", "--data", "text.txt", *SMALL)
    assert done.code == 0, done.stderr
    assert "bf16-stochastic" in done.stdout
    assert (place / "runs" / "train-1" / "report.html").is_file()


@pytest.mark.quick(
    "arguments0-unknown recipe 'bf61-mixed'; nearest: bf16-mixed",
    "arguments1-no recipe given",
    "arguments2-nowhere: no such file or folder",
    "arguments4-tiny_models:other: on the first batch it raised",
    "arguments5-message5",
    "arguments6---resume needs --out",
    "arguments7-holds no experiment to resume",
    "arguments9-text.txt cannot be written",
    "arguments10-steps = -3 given; expected a positive number",
    "arguments11-unknown task 'detecton'; nearest: detection",
    "arguments13-task 'speech' does not read --data",
    "arguments14-unknown model 'gpt-tiny'",
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--recipes", "bf61-mixed"], "unknown recipe 'bf61-mixed'; nearest: bf16-mixed"),
        (["compare", "--recipes", ","], "no recipe given"),
        (["compare", "--data", "nowhere"], "nowhere: no such file or folder"),
        (["compare", "--model", "tiny_models:modell"], "tiny_models: unknown function 'modell'; nearest: model"),
        (
            ["compare", "--model", "tiny_models:other", "--out", "o", "--data", "text.txt"],
            "tiny_models:other: on the first batch it raised",
        ),
        (
            ["compare", "--model", "tiny_models:trains_only", "--out", "o", "--data", "text.txt", "--context", "16"],
            "tiny_models:trains_only: in eval mode, on the held-out batches, it raised RuntimeError: it is too late",
        ),
        (["compare", "--resume"], "--resume needs --out"),
        (["compare", "--resume", "--out", "runs/none"], "holds no experiment to resume"),
        (["compare", "--out", "/proc/nowhere/run", "--data", "text.txt", *SMALL], "cannot be written"),
        (["compare", "--out", "text.txt", "--data", "text.txt", *SMALL], "text.txt cannot be written"),
        (["train", "--steps", "-3"], "steps = -3 given; expected a positive number"),
        (["compare", "--task", "detecton"], "unknown task 'detecton'; nearest: detection"),
        (
            ["compare", "--task", "vision", "--context", "64"],
            "task 'vision' does not read --context; it is an option of: lm",
        ),
        (["train", "--task", "speech", "--data", "text.txt"], "task 'speech' does not read --data"),
        (["train", "--task", "vision", "--model", "gpt-tiny"], "unknown model 'gpt-tiny'"),
        (["train", "--recipe", "fp23"], "unknown recipe 'fp23'; nearest: fp32"),
    ],
)
def test_bad_input_exits_2_with_one_message_and_writes_nothing(place, halfstep, arguments, message):
    before = sorted(p for p in place.rglob("*") if "__pycache__" not in p.parts)
    done = halfstep(*arguments)
    assert done.code == 2
    assert message in done.message
    assert "Traceback" not in done.stderr
    assert sorted(p for p in place.rglob("*") if "__pycache__" not in p.parts) == before


def test_model_failure_during_training_is_one_message_and_can_resume(place, halfstep, monkeypatch):
    arguments = ["train", "--recipe", "fp32", "--data", "text.txt", *SMALL, "--out", "runs/late"]
    arguments[arguments.index("tiny_models:model")] = "tiny_models:late"
    done = halfstep(*arguments)
    assert done.code == 2
    assert "tiny_models:late: under fp32, seed 0, it raised RuntimeError: it is too late (" in done.message
    assert "tiny_models.py:" in done.message
    assert "resume with --out runs/late --resume" in done.message
    monkeypatch.setattr(sys.modules["tiny_models"], "late", sys.modules["tiny_models"].model)
    assert halfstep(*arguments, "--resume").code == 0


def test_full_disk_is_reported_and_the_run_can_resume(place, halfstep, monkeypatch):
    arguments = ["train", "--recipe", "fp32", "--data", "text.txt", *SMALL, "--out", "runs/full"]

    def save(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("halfstep.lab.train.save_checkpoint", save)
        done = halfstep(*arguments)
    assert done.code == 2
    assert "runs/full cannot be written: [Errno 28] No space left on device. Fix that" in done.message
    assert "halfstep train --out runs/full --resume" in done.message
    assert halfstep(*arguments, "--resume").code == 0


@pytest.mark.parametrize(
    ("module", "words"),
    [("matplotlib.pyplot", r"needs matplotlib.pyplot, .* 'halfstep\[lab\]'"), ("numpy", None)],
)
def test_missing_module_names_its_extra(halfstep, monkeypatch, module, words):
    def command():
        raise ModuleNotFoundError("No module", name=module)

    monkeypatch.setattr("halfstep.cli.app.app", command)
    if words is None:  # numpy is a dependency: something else is wrong
        with pytest.raises(ModuleNotFoundError):
            halfstep("compare")
    else:
        done = halfstep("compare")
        assert done.code == 2
        assert re.search(words, done.message)


def test_edited_run_folder_is_rejected(place, halfstep):
    options = ["--recipe", "fp32", "--data", "text.txt", "--out", "runs/edited", *SMALL]
    assert halfstep("train", *options).code == 0
    metrics = place / "runs" / "edited" / "fp32" / "seed-0" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], "{broken", *lines[1:]]))
    done = halfstep("train", *options, "--resume")
    assert done.code == 2
    assert "metrics.jsonl, line 2: this is not a metrics row" in done.message
    (place / "runs" / "edited" / "experiment.json").write_text("{}")
    done = halfstep("train", *options, "--resume")
    assert "holds another experiment" in done.message


@pytest.mark.slow  # a fast test resumes a task's run
def test_resume_needs_only_the_run_folder(place, halfstep):
    options = ["--recipe", "bf16-nomaster", "--data", "text.txt", "--out", "runs/alone", *SMALL]
    assert halfstep("train", *options).code == 0
    done = halfstep("train", "--out", "runs/alone", "--resume", "--json")
    assert done.code == 0
    assert [v["recipe"] for v in json.loads(done.stdout)["verdicts"]][-1] == "bf16-nomaster"


MINE = """
name = "mine"
compute = "bf16"
[[rules]]
path = "*"
input = {format = "e4m3fn", tile = "tensor", scale = "delayed", history = 4}
weight = {format = "e4m3fn", tile = "tensor", scale = "current"}
"""


@pytest.mark.slow
def test_user_recipes_are_compared_and_resumed_without_their_file(place, halfstep):
    (place / "mine.toml").write_text(MINE)
    (place / "code.py").write_text("from halfstep import Recipe\nr = Recipe('coded', '', '', compute='fp16')\n")
    options = ["--data", "text.txt", "--out", "runs/own", "--baseline-seeds", "1", *SMALL]
    asked = ["--recipes", "fp32,mine.toml,code.py:r"]
    done = halfstep("compare", *asked, *options, "--json")
    assert done.code == 0, done.stderr
    assert [v["recipe"] for v in json.loads(done.stdout)["verdicts"]] == ["fp32", "mine", "coded"]
    again = halfstep("compare", *asked, *options, "--resume", "--json")
    assert json.loads(again.stdout)["verdicts"] == json.loads(done.stdout)["verdicts"]

    (place / "mine.toml").write_text(MINE.replace("history = 4", "history = 5"))
    changed = halfstep("compare", *asked, *options, "--resume")
    assert changed.code == 2
    assert "mine.toml has changed since this run began; put it back, or give another --out" in changed.message
    (place / "mine.toml").unlink()
    run = place / "runs" / "own" / "mine" / "seed-0"
    rows = (run / "metrics.jsonl").read_text().splitlines()
    for checkpoint in sorted((run / "checkpoints").iterdir())[1:]:  # as if killed after the first checkpoint
        shutil.rmtree(checkpoint)
    (run / "metrics.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    alone = halfstep("compare", "--out", "runs/own", "--resume", "--json")
    assert alone.code == 0, alone.stderr
    assert final_losses(alone) == final_losses(done)


def test_recipe_that_matches_no_layer_writes_nothing(place, halfstep):
    options = ["--data", "text.txt", "--out", "runs/none", *SMALL]
    done = halfstep("compare", "--recipes", "fp32,fp8-smooth-swiglu", *options)
    assert done.code == 2
    assert "recipe 'fp8-smooth-swiglu' smooths gated MLPs" in done.message
    (place / "mine.toml").write_text(MINE.replace('path = "*"', 'path = "*.nowhere"'))
    done = halfstep("compare", "--recipes", "mine.toml", *options)
    assert "rule '*.nowhere' matched no layer" in done.message
    assert not (place / "runs" / "none").exists()


def final_losses(done):
    return [v["final_loss"] for v in json.loads(done.stdout)["verdicts"]]


def test_duplicate_recipe_names_and_edited_recipe_data_are_rejected(place, halfstep):
    for name in ("one", "two"):
        (place / f"{name}.toml").write_text(MINE)
    done = halfstep("compare", "--recipes", "one.toml,two.toml", "--data", "text.txt", "--out", "runs/x", *SMALL)
    assert "two recipes are called 'mine', one of them from two.toml; rename one" in done.message
    assert halfstep("train", "--recipe", "one.toml", "--data", "text.txt", "--out", "runs/x", *SMALL).code == 0
    file = place / "runs" / "x" / "experiment.json"
    file.write_text(file.read_text().replace('"weights"', '"wieghts"'))
    done = halfstep("train", "--out", "runs/x", "--resume")
    assert done.code == 2
    assert "experiment.json: recipe 'mine' was edited: unknown key 'wieghts'; nearest: weights" in done.message


@pytest.mark.slow
def test_task_shows_its_metric_and_resumes(place, halfstep):
    options = ["--task", "recommender", "--recipes", "fp32,bf16-mixed", "--steps", "4", "--baseline-seeds", "1"]
    done = halfstep("compare", *options, "--out", "runs/liked")
    assert done.code == 0, done.stderr
    assert "AUC" in done.stdout
    assert "validation loss" in done.message
    assert ", AUC 0." in done.message
    again = halfstep("compare", "--out", "runs/liked", "--resume", "--json")
    summary = json.loads(again.stdout)
    assert summary["metric"]["name"] == "AUC"
    assert all(0 < v["final_metric"] < 1 for v in summary["verdicts"])
    page = (place / "runs" / "liked" / "report.html").read_text()
    assert "AUC" in page
    assert "compare --recipes fp32,bf16-mixed --task recommender --steps 4 --baseline-seeds 1 --out" in page
    other = halfstep("compare", "--task", "vision", "--out", "runs/liked", "--resume")
    assert "its task is 'recommender', 'vision' was asked for" in other.message


@pytest.mark.slow
def test_run_folder_without_a_task_is_read_and_resumed(place, halfstep):
    options = ["--recipe", "fp32", "--data", "text.txt", "--out", "runs/old", *SMALL]
    assert halfstep("train", *options).code == 0
    file = place / "runs" / "old" / "experiment.json"
    data = json.loads(file.read_text())
    del data["task"]
    del data["experiment"]["task"]
    file.write_text(json.dumps(data))
    metrics = place / "runs" / "old" / "fp32" / "seed-0" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [json.dumps({k: v for k, v in row.items() if k != "metric"}) for row in rows]
    metrics.write_text("\n".join(lines) + "\n")
    done = halfstep("train", *options, "--resume")
    assert done.code == 0, done.stderr
    assert "bits/byte" not in done.stdout
    assert "Not drawn: this task has no metric" in (place / "runs" / "old" / "report.html").read_text()


@pytest.mark.slow
def test_degraded_recipe_is_explained_in_output_and_report(place, halfstep):
    """Updates of 1e-6 are mostly lost on bf16 weights and rarely on fp32 ones."""
    options = ["--recipes", "fp32,bf16-nomaster", "--data", "text.txt", "--lr", "1e-5", "--margin", "1e-9", *SMALL]
    options[options.index("--steps") + 1] = "40"
    done = halfstep("compare", *options, "--seeds", "3", "--out", "runs/explained")
    assert done.code == 0, done.stderr
    verdicts = json.loads((place / "runs" / "explained" / "summary.json").read_text())["verdicts"]
    assert verdicts[1]["status"] == "degrades"
    words = " ".join(done.stdout.split())
    assert f"bf16-nomaster: {verdicts[1]['explanation']}." in words
    assert "of its updates changed no weight at step" in verdicts[1]["explanation"]
    page = (place / "runs" / "explained" / "report.html").read_text()
    assert "What was measured of those that did worse" in page
    assert "of its updates changed no weight at step" in page


@pytest.mark.slow
def test_staged_recipe_is_compared_like_a_recipe(halfstep, place):
    """Stages with and without commas, by steps and by fractions; the folder gets a plain name."""
    recipes = "fp32,bf16-mixed until 50%, then fp32 until step 5 then bf16-mixed,bf16-mixed"
    done = halfstep("compare", "--recipes", recipes, *SMALL, "--data", "text.txt", "--out", "stages")
    assert done.code == 0, done.stderr
    folder = place / "stages"
    name = "bf16-mixed-until-50pct-then-fp32-until-step-5-then-bf16-mixed"
    assert {path.name for path in folder.iterdir() if path.is_dir()} >= {"fp32", "bf16-mixed", name}
    (folder / name / "seed-0" / "metrics.jsonl").unlink()
    assert (
        halfstep("compare", "--recipes", recipes, *SMALL, "--data", "text.txt", "--out", "stages", "--resume").code == 0
    )


def test_unreachable_stage_is_rejected_before_writing(halfstep, place):
    done = halfstep(
        "train", "--recipe", "fp32 until step 900, then bf16-mixed", *SMALL, "--data", "text.txt", "--out", "never"
    )
    assert done.code == 2
    assert "begin after 900 steps of a run of total_steps = 6: one of them would have no step" in done.message
    assert not (place / "never").exists()
