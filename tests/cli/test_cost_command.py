"""`halfstep recipes cost`: table, JSON and bad arguments."""

import json

import pytest


MODEL = """
import torch
from torch import nn
from halfstep.lab.models.gpt import GPT

def gpt():
    return GPT(64, 40, layers=2, width=64, heads=4), torch.zeros(3, 33, dtype=torch.int64)

def dense():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(3, 8)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "models.py").write_text(MODEL)
    return lambda name: f"{tmp_path}/models.py:{name}"


def test_table_of_costs_by_matmul_kind(run, model):
    code, out, err = run("recipes", "cost", "fp8-current", "--model", model("gpt"), "--batch", "2")
    assert (code, err) == (0, "")
    rows = {line[:22].strip(): line[22:].split() for line in out.splitlines()[2:]}
    assert rows["attention linears"] == ["29.6%", *["8", "bits"] * 3, "50.0%", "2.00"]
    assert rows["head"][-2:] == ["100.0%", "1.00"]
    assert set(rows) == {
        "attention linears",
        "feed-forward linears",
        "attention core",
        "head",
        "all",
        "without the head",
    }
    assert "multiply-adds a step; fp8-current at fp16=1,fp8=2,fp4=4" in out.splitlines()[0]


def test_model_without_a_head(run, model):
    code, out, _ = run("recipes", "cost", "fp8-current", "--model", model("dense"))
    assert code == 0
    assert "without the head" not in out
    assert "50.0%      2.00" in out.splitlines()[-1]


def test_json_output(run, model):
    args = "--model", model("gpt"), "--speeds", "fp16=1,fp8=1.5", "--json"
    code, out, err = run("recipes", "cost", "fp8-current", *args)
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["speeds"] == {"16": 1.0, "8": 1.5}
    assert data["recipe"] == "fp8-current"
    time = sum(part["multiply_adds"] / data["speeds"][str(part["bits"])] for part in data["products"])
    assert data["all"]["share"] == pytest.approx(time / sum(part["multiply_adds"] for part in data["products"]))
    assert data["without_head"]["speed_up"] > data["all"]["speed_up"] > 1
    assert data["sent"] == {"ddp": 8.0, "fsdp": 12.0}  # float32 gradients twice; and weights twice


@pytest.mark.slow
def test_recipe_with_low_bit_communication(run, model, tmp_path):
    path = tmp_path / "mine.toml"
    eight = '{format = "e4m3fn", tile = "1x128", scale = "rceil", flat = true}'
    path.write_text(f'name = "mine"\nbase = "fp8-current"\n[communication]\ngradients = {eight}\nweights = {eight}\n')
    code, out, _ = run("recipes", "cost", str(path), "--model", model("gpt"), "--json")
    assert code == 0
    assert json.loads(out)["sent"] == {"ddp": 2 * 129 / 128, "fsdp": 3 * 129 / 128}
    code, out, _ = run("recipes", "cost", str(path), "--model", model("gpt"))
    assert "each of N devices sends 2.016 bytes a parameter under DDP, 3.023 where weights are sharded" in out
    code, out, _ = run("memory", model("gpt"), "--recipe", str(path), "--recipe", "fp8-current", "--dp", "2", "--json")
    (few, usual) = (row["bytes"]["sent"] for row in json.loads(out)["recipes"])
    assert few == pytest.approx(usual * 129 / 128 / 4, rel=1e-4)


def test_staged_recipes_and_overheads(run, model):
    args = "--model", model("gpt"), "--batch", "2"
    code, out, err = run("recipes", "cost", "fp4-zhou until step 5, then bf16-mixed", "--steps", "10", *args)
    assert (code, err) == (0, "")
    assert "8 bits, 16 bits" in out
    code, out, _ = run("recipes", "cost", "nvfp4", *args)
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("Hadamard transforms"))
    assert line.split()[2:5] == ["-", "-", "16"]


@pytest.mark.quick(
    "args0-nearest: fp8-current", "args2-expected widths and speeds", "args3-matmuls of 32 bits", "args4---steps"
)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("fp8-curent", "--model", "gpt2"), "nearest: fp8-current"),
        (("fp8-current", "--model", "gpt22"), "nearest: gpt2,"),
        (("fp8-current", "--model", "gpt2", "--speeds", "fp16=1,fp8"), "expected widths and speeds"),
        (("fp32", "--model", "gpt2"), "matmuls of 32 bits"),
        (("fp4-zhou until step 5, then bf16-mixed", "--model", "gpt2"), "--steps"),
        (("fp8-current",), "Missing option '--model'"),
    ],
)
def test_bad_arguments_exit_2(run, args, message):
    code, out, err = run("recipes", "cost", *args)
    assert (code, out) == (2, "")
    assert message in err
