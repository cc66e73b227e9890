"""`halfstep sweep` and `halfstep law`, run through the command line."""

import json

import pytest

from halfstep.lab.sweep.folder import SweepFolder
from halfstep.law import KUMAR


SMALL = ["--steps", "4", "--batch", "2", "--context", "16", "--model", "sweep_models:model", "--data", "text.txt"]
GRID = ["--grid", "lr=1e-3,1e-2", "--grid", "warmup=1", "--seeds", "2", "--jobs", "1"]
MODEL = """
from torch import nn

def model(width=8):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 8), nn.Linear(8, 256))

def wider():
    return model(16)

def widest():
    return model(32)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep_models.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("some text to learn from\n" * 200)
    return tmp_path


def test_sweep_runs_resumes_and_reports(place, run):
    code, said, errors = run("sweep", "--recipes", "fp32,bf16-mixed", *SMALL, *GRID, "--out", "swept")
    assert code == 0, errors
    assert "lr-0.01__warmup-1, bf16-mixed, seed 1: finished at step 4. 8 of 8; 0 min 00 s left" in errors
    assert "8 all, 8 finished" in said
    assert "bf16-mixed beside fp32" in said
    assert "cannot tell" in said
    assert (place / "swept" / "rates.png").read_bytes()[1:4] == b"PNG"
    code, said, _ = run("sweep", "status", "swept", "--json")
    status = json.loads(said)
    assert (code, status["cells"], status["finished"], status["running"]) == (0, 8, 8, False)
    _, said, _ = run("sweep", "report", "swept", "--json")
    summary = json.loads(said)
    assert summary == json.loads((place / "swept" / "summary.json").read_text())
    setting = summary["settings"]["warmup 1"]
    for recipe in ("fp32", "bf16-mixed"):
        for at in setting["recipes"][recipe]:
            rows = SweepFolder(place / "swept").rows((f"lr-{at['lr']:g}__warmup-1", recipe, 1))
            assert at["losses"]["1"] == [row["loss"] for row in rows if row["kind"] == "validation"][-1]
    best = min(setting["recipes"]["fp32"], key=lambda at: at["mean"])
    assert setting["best"]["fp32"]["lr"] == best["lr"]
    assert setting["best"]["fp32"]["loss"] == pytest.approx(best["mean"])
    code, _, errors = run("sweep", "--out", "swept", "--resume")
    assert code == 0, errors
    assert "finished at step" not in errors  # nothing was left


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--grid", "lr="], "--grid lr=: no values"),
        (["--grid", "lr=1e-3", "--lr", "1e-2"], "--lr and --grid lr both given; give one of them"),
        (["--grid", "width=1"], "unknown axis 'width'"),
        (["--resume"], "--resume needs --out"),
        (["--retry", "--out", "x"], "--retry needs --resume"),
        (["--resume", "--out", "nothing"], "expected the folder of a sweep, with sweep.json; found none"),
        (["--executor", "slurm"], "unknown executor 'slurm'"),
        (["--grid", "model=sweep_models:model,sweep_models:none"], "at model-sweep_models_none: "),
    ],
)
def test_bad_sweep_arguments_exit_2(place, run, given, said):
    code, _, errors = run("sweep", "--recipes", "fp32", *SMALL[:6], "--data", "text.txt", *given)
    assert code == 2
    assert said in " ".join(errors.split())


def test_status_of_a_folder_without_a_sweep_exits_2(place, run):
    code, _, errors = run("sweep", "status", ".")
    assert code == 2
    assert "expected the folder of a sweep, with sweep.json; found none" in " ".join(errors.split())


@pytest.mark.slow
def test_law_is_fitted_to_a_sweep(place, run):
    grid = ["--grid", "model=sweep_models:model,sweep_models:wider,sweep_models:widest", "--grid", "steps=4,8,16"]
    recipes = "fp32,weights-int2,weights-int3,weights-int4"
    shared = ["--batch", "2", "--context", "16", "--data", "text.txt", "--lr", "0.03", "--seeds", "2", "--jobs", "1"]
    code, _, errors = run("sweep", "--recipes", recipes, *grid, *shared, "--out", "sizes")
    assert code == 0, errors
    code, said, errors = run("law", "round", "sizes", "--bits", "2", "--json")
    assert code == 0, errors
    damages = json.loads(said)
    assert len(damages) == 3 * 3 * 4 * 2
    # Rounding a model that was trained in 2 bits to 2 bits does no damage.
    code, said, errors = run("law", "fit", "sizes", "--resamples", "3", "--out", "law.json", "--json")
    assert code == 0, errors
    fitted = json.loads(said)
    assert fitted["loss"]["cells"] == 72
    assert "damage" not in fitted  # the models have one width
    assert "a fit needs at least 3 values of each" in fitted["damage_not_fitted"]
    code, said, errors = run("law", "predict", "--law", "law.json", "--parameters", "4000", "--tokens", "500", "--json")
    assert code == 0, errors
    assert json.loads(said)["loss"] < 6


def test_predictions_equal_the_law(run):
    _, said, _ = run("law", "predict", "--parameters", "3e7", "--tokens", "2.6e10", "--post-bits", "4", "--json")
    found = json.loads(said)
    assert found["loss"] == pytest.approx(KUMAR.loss(3e7, 2.6e10, post=4))
    assert found["tokens_beyond_which_more_harm"] == pytest.approx(KUMAR.harmful_tokens(3e7, 4))
    _, said, _ = run("law", "predict", "--compute", "1e21")
    assert "bits                                 7.00" in said
    _, said, _ = run(
        "law", "predict", "--parameters", "1e9", "--tokens", "1e10", "--bits", "8", "--weights", "4", "--json"
    )
    widths = {"weights": 4, "activations": 8, "kv": 8}
    assert json.loads(said)["effective_parameters"] == pytest.approx(1e9 * KUMAR.share(widths))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["predict", "--parameters", "1e9"], "give --parameters and --tokens for a loss, or --compute"),
        (["predict", "--parameters", "1e9", "--tokens", "0"], "tokens = 0; expected a positive number"),
        (
            ["predict", "--parameters", "1", "--tokens", "1", "--bits", "4", "--post-bits", "4"],
            "leave --bits and --weig",
        ),
        (
            ["predict", "--compute", "1e20", "--law", "text.txt"],
            "text.txt is no law that `halfstep law fit --out` wrote",
        ),
        (["round", ".", "--bits", "few"], "--bits few; expected integers separated by commas"),
        (["fit", "."], "expected the folder of a sweep"),
    ],
)
def test_bad_law_arguments_exit_2(place, run, given, said):
    code, _, errors = run("law", *given)
    assert code == 2
    assert said in " ".join(errors.split())
