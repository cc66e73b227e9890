"""`halfstep probe`: verdicts, exit codes, written recipes, and bad arguments."""

import json

import pytest
import torch

import halfstep
from halfstep.recipe import get_recipe


SCRIPT = """
import torch
from torch import nn

class Tall(nn.Module):
    # What `up` returns is beyond 65504 for a large gain; what leaves the model is not.

    def __init__(self, gain):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 64)
        with torch.no_grad():
            self.up.weight *= gain
            self.down.weight /= gain

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(torch.tanh(self.down(self.up(x))))

class Hostile(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("a\\x1b[31m", nn.Linear(2, 2))

    def forward(self, x):
        return self.get_submodule("a\\x1b[31m")(x)

def tall(): return Tall(1e5)
def small(): return Tall(1.0)
def given(): return Tall(1.0), torch.arange(12).view(3, 4)
def hostile(): return Hostile(), torch.ones(2, 2)
def stopped(): raise KeyboardInterrupt
"""


@pytest.fixture
def probe(run, tmp_path, monkeypatch):
    """A function that runs `halfstep probe own.py:FUNCTION ...` in a temporary folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SCRIPT)
    return lambda function, *words: run("probe", f"own.py:{function}", "--batches", "2", "--context", "16", *words)


def test_safe_model_and_the_conditions_of_the_verdict(probe):
    code, out, err = probe("small")
    assert code == 0
    assert out.startswith("safe: Tall in fp16, forward and backward\n")
    assert "the Python standard library, as bytes modulo the vocabulary of 32: no tokenizer came with the model" in out
    assert "2 batches, 8 examples, 128 tokens; 0 training steps" in out
    assert "loss sent back: the outputs times fixed normal noise" in out
    assert "work: from 2^" in out
    assert "bits left" in out
    assert err == ""


def test_unsafe_model_and_the_written_recipe(probe):
    code, out, err = probe("tall", "--write-recipe", "kept.toml")
    assert code == 1
    assert out.startswith("UNSAFE: Tall in fp16")
    assert "first to fail: output of up (Linear)" in out
    assert "suggestion: fp16-master, with up, down in float32; run for real: fp16-master-kept passes" in out
    assert "wrote kept.toml" in err
    recipe = get_recipe("kept.toml")
    assert recipe.float32_modules == ("up", "down")
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    halfstep.apply(model, recipe)
    assert [model[name].weight.dtype for name in ("up", "head")] == [torch.float32, torch.float16]


def test_json_holds_every_range(probe):
    code, out, _ = probe("tall", "--to", "fp16", "--train-steps", "2", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["safe"] is False
    assert found["first_failure"] == "output of up (Linear)"
    assert found["conditions"]["train_steps"] == 2
    assert found["suggestion"]["float32_modules"][0] == "up"
    assert found["knowledge_base"] is None
    (up,) = (r for r in found["ranges"] if (r["module"], r["role"]) == ("up", "output"))
    assert up["largest"] > 65504
    assert up["fits"] is False
    assert 0 < up["beyond"] <= 1
    assert any(r["backward"] for r in found["ranges"])


@pytest.mark.slow
def test_bf16_has_the_range_for_an_fp16_overflow(probe):
    assert probe("tall", "--to", "bf16")[0] == 0


def test_inputs_of_the_model_or_of_a_file(probe, tmp_path):
    code, out, _ = probe("given")
    assert code == 0
    assert "the inputs that came with the model; 1 batch, 3 examples, 12 tokens" in out
    torch.save([torch.zeros(2, 3, dtype=torch.long)], tmp_path / "x.pt")
    code, out, _ = probe("given", "--data", "x.pt")
    assert "the tensors in x.pt; 1 batch, 2 examples, 6 tokens" in out
    (tmp_path / "words.txt").write_text("one two three four five " * 20)
    assert "words.txt, as bytes modulo" in probe("given", "--data", "words.txt")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tall", "--to", "fp61"], "unknown format 'fp61'; nearest: fp16"),
        (["tall", "--to", "mxfp4"], "'mxfp4' is a block format"),
        (["tall", "--loss-scale", "-1"], "--loss-scale -1 given; expected a positive number"),
        (["tall", "--data", "empty.txt"], "every file is empty"),
        (["tall", "--data", "absent.txt"], "no such file or folder"),
        (["tall", "--data", "absent.pt"], "cannot be read as tensors"),
        (["tall", "--data", "short.txt", "--context", "64"], "one window takes 64; give more, or a smaller --context"),
        (["tall", "--write-recipe", "no/such/kept.toml"], "its folder does not exist"),
        (["nothing"], "unknown function 'nothing'"),
    ],
)
def test_bad_arguments_exit_2(probe, tmp_path, words, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short " * 9)
    code, out, err = probe(*words)
    assert code == 2
    assert message in " ".join(err.split())
    assert out == ""


def test_no_recipe_is_written_if_none_passed(probe, tmp_path):
    code, _, err = probe("tall", "--to", "fp32", "--loss-scale", "1e38", "--write-recipe", "kept.toml")
    assert code == 1
    assert "kept.toml was not written: no recipe passed" in err
    assert not (tmp_path / "kept.toml").exists()


def test_interrupt_exits_130_with_one_line(probe):
    assert probe("stopped") == (130, "", "stopped; nothing was changed\n")


def test_control_characters_in_module_names_are_escaped(probe):
    code, out, _ = probe("hostile")
    assert code == 0
    assert "\x1b[31m" not in out
    assert "a\\x1b" in out
