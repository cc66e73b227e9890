"""`halfstep recipes`, and behaviour common to all commands: JSON output, exit code 2 for bad arguments."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfstep import get_recipe
from halfstep.recipe import to_data
from tiny import ALL, mostly_slow


PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
PLANNED = [("llama2-7b", "nvfp4"), ("resnet-50", "bf16-stochastic")]


def test_recipes_lists_every_recipe(run):
    code, out, err = run("recipes")
    assert (code, err) == (0, "")
    for name in ALL:
        line = next(line for line in out.splitlines() if line.split()[0] == name)
        assert f" {get_recipe(name).bytes_per_parameter().total:g} " in line


@pytest.mark.parametrize(
    ("model", "recipe"),
    [("gpt2", "fp8-delayed"), *(pytest.param(*each, marks=pytest.mark.slow) for each in PLANNED)],
)
def test_documentation_shows_the_printed_plans(run, carry, model, recipe):
    carry()  # as on a CPU with native 16-bit matmuls
    code, out, _ = run("recipes", "plan", model, "--recipe", recipe)
    assert code == 0
    assert f"$ halfstep recipes plan {model} --recipe {recipe}\n{out}```" in PAGE.read_text()


def test_plan_as_json_and_of_a_file_without_layers(run, tmp_path):
    code, out, _ = run("recipes", "plan", "tiny:mlp", "--recipe", "nvfp4", "--json")
    data = json.loads(out)
    assert code == 0
    assert (data["recipe"], [*data["layers"]]) == ("nvfp4", ["0", "3"])
    save_file({"weight": torch.zeros(4, 4)}, tmp_path / "w.safetensors")
    code, _, err = run("recipes", "plan", str(tmp_path / "w.safetensors"), "--recipe", "nvfp4")
    assert code == 2
    assert "holds tensors and no layers: give the model's config.json" in err


def test_recipes_as_json(run):
    code, out, _ = run("recipes", "--json")
    assert code == 0
    assert [recipe["name"] for recipe in json.loads(out)] == ALL


@pytest.mark.quick("fp32", "fp8-smooth-swiglu", "fp4-wang")
@pytest.mark.parametrize("name", mostly_slow(ALL))  # tests/recipe covers all
def test_shown_recipe_equals_its_description(run, name):
    code, out, err = run("recipes", "show", name)
    assert (code, err) == (0, "")
    assert out == get_recipe(name).describe() + "\n"
    code, out, _ = run("recipes", "show", name, "--json")
    data, recipe = json.loads(out), get_recipe(name)
    assert code == 0
    for key in ("name", "weights", "master", "compute", "update_rounding"):
        assert data[key] == getattr(recipe, key)
    assert data["moments"] == to_data(recipe)["moments"]
    assert data["grads"] == recipe.grad_format
    assert data["bytes_per_parameter"]["total"] == recipe.bytes_per_parameter().total


def test_recipe_of_a_toml_file(run, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('name = "mine"\nbase = "mxfp8"\n')
    code, out, _ = run("recipes", "show", str(file))
    assert code == 0
    assert out == get_recipe(str(file)).describe() + "\n"
    code, out, _ = run("recipes", "show", str(file), "--json")
    assert json.loads(out)["rules"][-1]["output"]["lhs"]["tile"] == "1x32"
    file.write_text('name = "mine"\nbsae = "mxfp8"\n')
    code, out, err = run("recipes", "show", str(file))
    assert (code, out) == (2, "")
    assert f"{file}, line 2: unknown key 'bsae'; nearest: base" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipes", "show", "bf16-mixd"], "unknown recipe 'bf16-mixd'; nearest: bf16-mixed"),
        (["recipes", "show", "[bold]x[/bold]"], "unknown recipe '[bold]x[/bold]'"),
        (["recipes", "show"], "Missing argument"),
        (["nonsense"], "No such command 'nonsense'"),
        (["formats", "--yaml"], "No such option"),
    ],
)
def test_bad_arguments_exit_2_with_a_message_on_stderr(run, arguments, words):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_version_and_help(run):
    assert run("--version")[:2] == (0, "halfstep 0.1.0\n")
    code, out, _ = run("--help")
    assert code == 0
    assert "formats" in out
    assert "recipes" in out
