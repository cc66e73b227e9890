"""`halfstep memory`: tables, JSON, largest batches, and bad arguments."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from families import for_each
from halfstep.accounting import architectures, bytes_from, largest, load_subject
from halfstep.accounting.subject import _check_config
from halfstep.errors import AccountError, ModelError


SCRIPT = """
import torch
from torch import nn
from halfstep.lab.models.gpt import GPT

def gpt(): return GPT(64, 40, 2, 64, 4)
def given(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2)), torch.zeros(2, 3, 8, 8)
def blind(): return nn.Linear(8, 8)
def text(): return "a model"
"""


@pytest.fixture
def memory(run, tmp_path, monkeypatch):
    """A function that runs `halfstep memory MODEL ...` in a temporary folder; MODEL may be a function of `own.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SCRIPT)
    return lambda model, *words: run("memory", f"own.py:{model}" if model in SCRIPT else model, *words)


def as_data(result):
    code, out, err = result
    assert code in (0, 1), err
    return json.loads(out)


def cells(out):
    """The number of each row of a table, by its title."""
    rows = [line.rsplit("  ", 1) for line in out.splitlines() if "  " in line]
    return {title.strip(): number.strip() for title, number in rows}


def test_table_of_roles(memory):
    code, out, _ = memory("gpt", "--batch", "3", "--seq", "33", "--recipe", "bf16-master")
    assert code == 0
    assert out.startswith("own.py:gpt: 110,848 parameters; a batch of 3 x 33 tokens; adamw\n")
    found = cells(out)
    assert found["weights"] == found["gradients"] == f"{2 * 110848 / 2**20:.2f}"
    assert found["optimizer states"] == f"{(8 * 110848 + 4 * 28) / 2**20:.2f}"
    assert found["persistent bytes a parameter"] == "16"
    assert "compute copies of weights" not in found  # rows of zeros are left out
    assert float(found["peak, in MB"]) == pytest.approx(1.048576 * float(found["peak"]), abs=0.02)


@pytest.mark.slow
def test_several_recipes_in_table_and_json(memory):
    options = ("--recipe", "fp32", "--recipe", "bf16-pure", "--batch", "2", "--seq", "16")
    _, out, _ = memory("gpt", *options)
    assert out.splitlines()[1].split() == ["MiB", "fp32", "bf16-pure"]
    data = as_data(memory("gpt", *options, "--json"))
    full, half = (row["bytes"] for row in data["recipes"])
    assert full["weights"] == 2 * half["weights"] == 4 * 110848
    assert full["persistent"] == sum(full[role] for role in ("weights", "gradients", "states"))
    assert data["sequence"] == 16


@pytest.mark.slow
def test_zero_stages_shard_over_devices(memory):
    one, eight = (
        as_data(memory("gpt", "--recipe", "bf16-master", "--seq", "16", *more, "--json"))["recipes"][0]["bytes"]
        for more in ((), ("--dp", "8", "--zero", "2"))
    )
    assert eight["weights"] == one["weights"]
    for role in ("gradients", "master", "states"):
        assert eight[role] == -(-one[role] // 8)
    _, out, _ = memory("gpt", "--seq", "16", "--dp", "8", "--zero", "3")
    assert "one of 8 devices, ZeRO stage 3" in out
    assert "persistent, all 8 devices" in out


@pytest.mark.slow
def test_largest_batch_fits_and_the_next_does_not(memory):
    row = as_data(memory("gpt", "--seq", "16", "--device-memory", "8MB", "--json"))["recipes"][0]
    found = row["largest_batch"]
    peaks = [
        as_data(memory("gpt", "--seq", "16", "--batch", str(batch), "--json"))["recipes"][0]["bytes"]["peak"]
        for batch in (found, found + 1)
    ]
    assert peaks[0] <= 8_000_000 < peaks[1]
    assert row["its_peak"] == peaks[0]


def test_model_that_does_not_fit_exits_1(memory):
    code, out, _ = memory("gpt", "--seq", "16", "--device-memory", "1MB")
    assert code == 1
    assert cells(out)["largest batch in 1MB"] == "none"


@pytest.mark.parametrize("slope", [0, 1, 7, 1000])
@pytest.mark.parametrize("start", [1, 5, 64])
def test_largest_evaluates_few_batches(slope, start):
    asked = []

    def peak(batch):
        asked.append(batch)
        return 100 + slope * batch + batch // 3  # rounding makes it not quite linear

    found, its = largest(peak, 5000, (start, 100 + slope * start + start // 3))
    assert its <= 5000 < 100 + slope * (found + 1) + (found + 1) // 3 or found == 0
    assert len(asked) < 25


def test_inputs_returned_with_the_model(memory):
    small, large = (
        as_data(memory("given", "--batch", batch, "--json"))["recipes"][0]["bytes"]["activations"]
        for batch in ("2", "4")
    )
    assert large - 4 == 2 * (small - 4)  # except the loss


def test_safetensors_file_gives_all_but_activations(memory, tmp_path):
    save_file(
        {"a": torch.zeros(64, 32, dtype=torch.bfloat16), "b": torch.zeros(7), "n": torch.arange(3)}, "w.safetensors"
    )
    code, out, _ = memory("w.safetensors", "--recipe", "bf16-nomaster")
    assert code == 0
    assert cells(out)["saved activations"] == cells(out)["peak"] == "unknown"
    assert "what activations take is unknown" in out
    data = as_data(memory("w.safetensors", "--recipe", "bf16-nomaster", "--json"))
    assert data["recipes"][0]["bytes"]["weights"] == 2 * (64 * 32 + 7)
    code, _, err = memory("w.safetensors", "--device-memory", "1GB")
    assert code == 2
    assert "a checkpoint has no forward pass" in err


def test_safetensors_file_under_recipes_with_rules(memory):
    """Stored bytes do not depend on matmuls; recipes for which they depend on which matrices are linear raise."""
    save_file({"a": torch.zeros(64, 128)}, "w.safetensors")
    kept = as_data(memory("w.safetensors", "--recipe", "coat", "--json"))["recipes"][0]["bytes"]
    assert kept["weights"] == kept["gradients"] == 4 * 64 * 128
    assert kept["states"] + kept["scales"] == 2.1875 * 64 * 128 + 4  # plus the step count
    for recipe in ("fp8lm-o2", "galore"):
        code, _, err = memory("w.safetensors", "--recipe", recipe)
        assert code == 2
        assert f"which of its matrices are linear layers, and recipe '{recipe}' stores" in " ".join(err.split())


@pytest.fixture
def config(tmp_path):
    transformers = pytest.importorskip("transformers")
    kind = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=48, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    kind.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@for_each("more, said", [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000; expected at most 2,000"),
    ({"text_config": {"n_layer": 10**9}}, "n_layer is 1,000,000,000"),
    ({"depths": [2, 2, 10**30, 2]}, "depths is 1,000,000,"),
    ({"n_routed_experts": 10**9}, "n_routed_experts is 1,000,000,000; expected at most 10,000"),
    ({"num_labels": 10**9}, "num_labels is 1,000,000,000; expected at most 1,000,000"),
    ({"num_hidden_layers": 1000, "num_local_experts": 1000}, "1,000 layers of 1,000 experts; expected at most 200,000"),
    ({"model_type": None}, ""),
])  # fmt: skip
def test_config_with_too_many_layers_or_labels_raises(more, said, tmp_path):
    """The check precedes building the config, whose lists of layers or labels would fill the memory."""
    (tmp_path / "other.json").write_text(json.dumps({"model_type": "llama"} | more))
    if said:
        with pytest.raises(ModelError, match=re.escape(said)):
            load_subject(str(tmp_path / "other.json"))
    published = {"num_hidden_layers": 61, "n_routed_experts": 384, "num_labels": 21_843, "max_window_layers": 61,
                 "vocab_size_per_layer_input": 262_144, "max_position_embeddings": 10**8}  # fmt: skip
    _check_config(tmp_path, {"model_type": "kimi_k2", "use_cache": True, **published})
    for row in architectures().values():
        _check_config(tmp_path, {"model_type": row["type"], **row["config"]})


@for_each("text, said", [
    ("{", "is not JSON"), ("[1]", "is a JSON list; expected an object"), ("{}", "is JSON without a model_type"),
])  # fmt: skip
def test_json_that_is_no_config_exits_2(memory, text, said, tmp_path):
    (tmp_path / "other.json").write_text(text)
    code, _, err = memory(str(tmp_path / "other.json"))
    assert code == 2
    assert said in " ".join(err.split())


def test_config_without_weights_is_enough(memory, config):
    whole = as_data(memory(str(config), "--json"))
    assert whole == {**as_data(memory(str(config / "config.json"), "--json")), "model": str(config)}
    assert whole["recipes"][0]["bytes"]["weights"] == 4 * whole["recipes"][0]["parameters"]
    other = (config / "config.json").rename(config.parent / "other.json")
    assert as_data(memory(str(other), "--json")) == {**whole, "model": str(other)}
    other.rename(config / "config.json")
    code, _, err = memory(str(config), "--seq", "49")
    assert code == 2
    assert "has positions for 48 tokens" in err


def test_inference_counts_the_kv_cache(memory, config):
    data = as_data(memory(str(config), "--inference", "--batch", "3", "--seq", "40", "--recipe", "bf16-pure", "--json"))
    found = data["recipes"][0]["bytes"]
    assert (
        found["kv_cache"] == 2 * 2 * 2 * 16 * 3 * 40 * 2
    )  # k and v, layers, heads, head size, examples, tokens, bytes
    assert found["persistent"] == found["weights"] + found["buffers"] + found["kv_cache"]
    code, _, err = memory(str(config), "--inference", "--dp", "2")
    assert code == 2
    assert "trains nothing" in err


@pytest.mark.slow
def test_plot_option(memory):
    pytest.importorskip("matplotlib")
    assert memory("gpt", "--seq", "16", "--plot", "memory.png", "--device-memory", "8MB")[0] == 0
    with open("memory.png", "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    code, _, err = memory("gpt", "--seq", "16", "--plot", "memory.nothing")
    assert code == 2
    assert "give a file such as memory.png" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing-7b",), "unknown architecture 'nothing-7b'"),
        (("own.py:none",), "unknown function 'none'"),
        (("own.py:text",), "the function returned str; expected a torch.nn.Module"),
        (("own.py:blind",), "its inputs are unknown: have the function return (model, inputs)"),
        (("own.py:gpt", "--recipe", "bf16-mastr"), "nearest: bf16-master"),
        (("own.py:gpt", "--zero", "2"), "there is one: say over how many, such as --dp 8"),
        (("own.py:gpt", "--zero", "5", "--dp", "2"), "expected a stage from 0 to 3"),
        (("own.py:gpt", "--per-layer", "--dp", "2"), "before gradients are summed over devices"),
        (("own.py:gpt", "--optimizer", "adan"), "unknown optimizer 'adan'; nearest: adam"),
        (("own.py:gpt", "--checkpointing", "some"), "unknown checkpointing 'some'"),
        (("own.py:gpt", "--device-memory", "80"), "1 GB is 10^9 bytes, 1 GiB 2^30"),
    ],
)
def test_bad_arguments_exit_2(memory, words, message):
    code, _, err = memory(*words)
    assert code == 2
    assert message in " ".join(err.split())


def test_config_without_transformers_names_the_extra(memory, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = memory("llama-7b")
    assert code == 2
    assert "pip install 'halfstep[hf]'" in err


@pytest.mark.parametrize(("text", "size"), [("80GB", 80 * 10**9), ("74.5 GiB", int(74.5 * 2**30)), ("1TB", 10**12)])
def test_sizes_with_units_are_parsed(text, size):
    assert bytes_from(text) == size


@pytest.mark.parametrize("text", ["80", "80G", "GB", "0GB", "-1GB", "80gb"])
def test_sizes_without_units_raise(text):
    with pytest.raises(AccountError, match="1 GiB 2"):
        bytes_from(text)
