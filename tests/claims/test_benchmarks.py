"""The benchmarks behind the ledger's long rows: their statistics on known losses, and that their recipes exist."""

import importlib
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from halfstep.lab.models.gpt import GPT
from halfstep.lab.task import VOCABULARY
from halfstep.lab.tasks import experiment_for
from halfstep.recipe import get_recipe


@pytest.fixture
def load(monkeypatch):
    """A function that imports a benchmark by name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module


def test_gaps_are_paired_by_seed_and_absent_for_divergences(load):
    found = load("losses").summary({"fp32": [2.0, 4.0], "a": [2.2, 4.0], "b": [1.0, None], "c": [None, None]})
    none = {"least": 0.0, "most": 0.0, "low": 0.0, "high": 0.0}
    assert found["fp32"] == {"loss": 3.0, "gap": 0.0, "diverged": 0} | none
    ends = {"least": 0.0, "most": 0.1, "low": 0.05 - 12.7062 * 0.05, "high": 0.05 + 12.7062 * 0.05}  # t of one degree
    assert found["a"] == pytest.approx({"loss": 3.1, "gap": 0.05, "diverged": 0} | ends, rel=1e-4)
    assert found["b"] == {"loss": 1.0, "gap": None, "least": None, "most": None, "diverged": 1}
    assert found["c"] == {"loss": None, "gap": None, "least": None, "most": None, "diverged": 2}


def test_diverged_baseline_raises(load):
    with pytest.raises(ValueError, match="fp32 diverged with seed 1; nothing can be compared with it"):
        load("losses").summary({"fp32": [2.0, None], "a": [2.2, 4.0]})


@pytest.mark.slow
def test_runs_train_the_given_model_and_finished_runs_are_read(load, tmp_path, capsys):
    train = load("losses").train
    experiment = experiment_for("lm", recipes=("fp32",), steps=2, seeds=2, validations=1, batch=2, context=8)
    recipes = {"fp32": get_recipe("fp32"), "own": replace(get_recipe("bf16-mixed"), name="own")}
    make = partial(GPT, VOCABULARY, experiment.context, 1, 8, 1)
    first = train(experiment, recipes, tmp_path, make)
    assert all(abs(loss - math.log(VOCABULARY)) < 0.1 for losses in first.values() for loss in losses)
    assert len({loss for losses in first.values() for loss in losses}) == 4
    size = {file.stat().st_mtime_ns for file in tmp_path.rglob("metrics.jsonl")}
    assert train(experiment, recipes, tmp_path, make) == first
    assert {file.stat().st_mtime_ns for file in tmp_path.rglob("metrics.jsonl")} == size
    assert capsys.readouterr().out.count("own seed 1") == 2


@pytest.mark.parametrize("group", ["betas", "masters", "states", "window"])
def test_groups_hold_distinct_recipes(load, group):
    for comparison in load("ledger").GROUPS[group]().values():
        assert comparison.baseline in comparison.recipes
        recipes = list(comparison.recipes.values())
        assert all(one != other for n, one in enumerate(recipes) for other in recipes[n + 1 :])
        assert comparison.experiment.seeds >= 2


def comparison(**most):
    """The figures `ledger.py window` writes for gaps that are equal over all seeds."""
    rows = {name: {"gap": gap, "most": gap, "diverged": int(gap is None)} for name, gap in most.items()}
    return {"summary": rows, "experiment": {"seeds": 2, "steps": 60}}


def test_window_spans_the_matching_constants(load):
    wide = comparison(**{"fp16": 0.0, "fp8-amax": 0.001, "c-4": 0.02, "c+0": 0.004, "c+2": -0.1, "c+6": None})
    shut = comparison(**{"fp16": 0.0, "fp8-amax": 0.001, "c-4": 0.02, "c+0": 0.006, "c+2": 0.1, "c+6": None})
    lines = list(load("fp8_sections").constants({"comparisons": {"wide": wide, "shut": shut}}))
    assert "| model | fp8-amax | c = -4 | c = 0 | c = 2 | c = 6 | window |" in lines[0]
    assert lines[1] == "| wide | +0.10% | +2.00% | +0.40% | -10.00% | diverged | 0 to 2 |"
    assert lines[2].endswith("| none |")


def test_counts_which_of_two_recipes_is_better(load):
    def row(without, smooth):
        ratio = {"ratio": 1.25, "least": 1.0, "most": 1.5}
        runs = {"without": [{"loss": loss} for loss in without], "smooth": [{"loss": loss} for loss in smooth]}
        return {
            "tail": 1.0,
            "decay": 0.1,
            "outlier": 30.4,
            "jump": 4.04,
            "runs": runs,
            "without": ratio,
            "smooth": ratio,
        }

    data = {"seeds": 2, "steps": 400, "rows": [row([2.0, 1.0], [1.0, 1.0]), row([2.0, 1.0], [1.5, math.nan])]}
    text = " ".join(load("fp8_sections").smooth(data))
    assert "| 1 | 0.1 | 30 | 4.0 | 1.25 (1.00 to 1.50) | 1.25 (1.00 to 1.50) |" in text
    assert "In 2 of 4 pairs of runs with the same setting and seed Smooth-SwiGLU has the lower loss." in text
    assert "1 of the 8 runs diverged." in text


def test_text_on_both_betas_follows_the_gaps(load):
    def data(light):
        rows = {"bf16-collage-light": light, "bf16-collage-plus": 0.0001}
        summary = {n: {"loss": 2.0, "gap": g, "least": g, "most": g} for n, g in {"fp32": 0.0, **rows}.items()}
        found = {"summary": summary, "experiment": {"seeds": 3, "steps": 400}}
        return {"comparisons": {"0.999": found}, "machine": {"torch": "2", "cpu": "a CPU"}}

    both_betas = load("which_bf16_betas").both_betas
    assert "from fp32 and `bf16-collage-plus` +0.01%. In so few steps this still" in " ".join(both_betas(data(0.001)))
    assert "`bf16-collage-light` lies +5.00% from fp32" in " ".join(both_betas(data(0.05)))
    assert "This degrades" in " ".join(both_betas(data(0.05)))


def test_gaps_to_fp32_respect_the_direction_of_the_metric(load):
    differences = load("finetune").differences_to_fp32
    losses = {"fp32": [2.0, 2.1, 2.2], "worse": [2.1, 2.2, 2.3], "lost": [2.0, None, 2.0]}
    found = differences(losses)
    assert set(found) == {"worse", "lost"}
    assert found["lost"] == {"status": "diverged"}
    assert found["worse"]["status"] == "degrades"
    assert found["worse"]["gap"] == pytest.approx(0.1 / 2.1)
    assert differences(losses, higher_is_better=True)["worse"]["gap"] == pytest.approx(-0.1 / 2.1)


@pytest.mark.slow
def test_fine_tuning_starts_from_the_files_weights(load, tmp_path):
    experiment = experiment_for("lm", recipes=("fp32",), batch=2, context=8)
    torch.manual_seed(5)
    kept = GPT(VOCABULARY, 8, 2, 128, 4)
    save_model(kept, str(tmp_path / "weights.safetensors"))
    found = load("finetune").loaded(experiment, tmp_path / "weights.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), kept.parameters(), strict=True))


def test_written_section_replaces_the_old_one(load, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n## Measured\n\nold\n\n## After\n\nstays\n")
    load("memory_page").write(page, "## Measured\n\nnew\n")
    assert page.read_text() == "# A page\n\n## Measured\n\nnew\n\n## After\n\nstays\n"


def test_stacked_cells_equal_torchs_lstm(load):
    recurrent = load("recurrent")
    torch.manual_seed(0)
    stack, x = recurrent.Stack(3, 8), torch.randn(2, 5, 8)
    lstm = torch.nn.LSTM(8, 8, 3, batch_first=True)
    for number, cell in enumerate(stack.cells):
        for name, parameter in cell.named_parameters():
            getattr(lstm, f"{name}_l{number}").data.copy_(parameter.data)
    y, states = stack(x)
    expected, (h, c) = lstm(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.stack([torch.stack(state) for state in states], 1), torch.stack([h, c]))
    later, _ = stack(x[:, 3:], stack(x[:, :3])[1])
    torch.testing.assert_close(later, expected[:, 3:])


def test_translator_attends_to_the_source_but_not_to_later_tokens(load):
    torch.manual_seed(0)
    model = load("recurrent").Translator(9, 11, layers=2, width=8)
    source, target = torch.randint(9, (2, 4)), torch.randint(11, (2, 6))
    logits = model(source, target)
    other = target.clone()
    other[:, 3:] = (other[:, 3:] + 1) % 11
    assert torch.equal(model(source, other)[:, :3], logits[:, :3])
    assert not torch.equal(model((source + 1) % 9, target)[:, 0], logits[:, 0])
