"""Exported models: stock transformers loads each on a CPU, with weights that equal ours bit for bit."""

import copy
import json
import warnings

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import halfstep
from halfstep.errors import CheckpointError, LayoutError, ModelError, RecipeError
from halfstep.nn.laid_out import KEY
from tiny import assert_same


logging.disable_progress_bar()
ROWS = {
    "fp8-tensor": "fp8-current",
    "fp8-channel": "fp8-rowwise",
    "fp8-block": "fp8-block",
    "deepseek-fp8": "fp8-block",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}
"""A recipe for each layout."""
every_layout = pytest.mark.parametrize("layout", ROWS)


def llama(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options}))


def contents(folder):
    """All that the weights' file says, and config.json."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = {key: file.get_tensor(key).contiguous() for key in sorted(file.keys())}
        tensors = {k: (str(t.dtype), t.shape, t.view(torch.uint8).numpy().tobytes()) for k, t in found.items()}
        return tensors, file.metadata(), (folder / "config.json").read_text()


def stock(folder, layout, dtype=torch.float32):
    """The model as transformers loads it."""
    options = {} if layout == "deepseek-fp8" else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return model


@every_layout
def test_transformers_loads_the_values_that_we_multiply_by(layout, tmp_path):
    model = llama()
    halfstep.quantize_model(model, ROWS[layout])
    done = halfstep.export(model, tmp_path / "served", layout)
    assert (done.format, done.recipe, done.kept) == (layout, ROWS[layout], {})
    loaded = stock(tmp_path / "served", layout)
    # compressed-tensors decodes NVFP4 in bf16, whatever dtype is asked for
    dtype = torch.bfloat16 if layout == "nvfp4" else torch.float32
    changed = 0
    for path in done.quantized:
        assert_same(loaded.get_submodule(path).weight.to(dtype), model.get_submodule(path).weight.to(dtype))
        changed += not torch.equal(loaded.get_submodule(path).weight, llama().get_submodule(path).weight)
    assert changed == len(done.quantized) > 5
    assert_same(loaded.lm_head.weight, llama().lm_head.weight)
    with safe_open(tmp_path / "served" / "model.safetensors", "pt") as file:
        said = json.loads(file.metadata()[KEY])
    assert (said["halfstep"], said["recipe"]["name"], said["layout"]) == (halfstep.__version__, done.recipe, layout)


def test_a_stock_model_a_followed_one_and_a_quantised_one_are_written_alike(tmp_path):
    followed, quantized = llama(), llama()
    halfstep.apply(followed, "fp8-rowwise")
    halfstep.quantize_model(quantized, "fp8-rowwise")
    halfstep.export(llama(), tmp_path / "a", "fp8-channel", recipe="fp8-rowwise")
    halfstep.export(followed, tmp_path / "b")
    quantized.save_pretrained(tmp_path / "c")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert "_halfstep" in vars(followed)  # the model itself is left as it was
    assert followed.model.layers[0].mlp.up_proj.weight.requires_grad


def test_what_has_no_counterpart_is_refused_with_what_has(tmp_path):
    words = (
        r"recipe 'fp8-block' rounds weights to float8_e4m3fn \(rceil, 128x128\), which the layout 'fp8-channel' does"
    )
    with pytest.raises(LayoutError, match=words + r".*Layouts that do: fp8-block, deepseek-fp8, mxfp8"):
        halfstep.export(llama(), tmp_path / "a", "fp8-channel", recipe="fp8-block")
    with pytest.raises(LayoutError, match=r"recipe 'fp8-amax' rounds weights in a way that no layout holds"):
        halfstep.export(llama(), tmp_path / "a", recipe="fp8-amax")
    with pytest.raises(LayoutError, match=r"unknown layout 'fp8-chanel'; nearest: fp8-channel"):
        halfstep.export(llama(), tmp_path / "a", "fp8-chanel", recipe="fp8-block")
    with pytest.raises(RecipeError, match=r"follows no recipe, so nothing says how its weights are rounded: give one"):
        halfstep.export(llama(), tmp_path / "a")
    with pytest.raises(ModelError, match=r"this Linear is no Hugging Face model"):
        halfstep.export(torch.nn.Linear(8, 8), tmp_path / "a", recipe="mxfp8")
    with pytest.raises(LayoutError, match=r"left no factor of its input, which a static layout holds"):
        halfstep.export(llama(), tmp_path / "a", "fp8-static", recipe="fp8-delayed")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match=r"exists and is not empty; name a new folder"):
        halfstep.export(llama(), tmp_path, recipe="mxfp8")
    with pytest.raises(CheckpointError, match=r"is not there, or read-only"):
        halfstep.export(llama(), tmp_path / "no" / "where", recipe="mxfp8")
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_nothing_is_left_of_a_folder_that_could_not_be_finished(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("halfstep.layouts.folder.save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device"):
        halfstep.export(llama(), tmp_path / "a", recipe="mxfp8")
    assert not list(tmp_path.iterdir())


def test_layers_that_do_not_fit_are_values_and_under_ignore(tmp_path):
    """An input of 80 has no whole blocks of 32; k_proj's 64 outputs have none of 128, and q and v go with it."""
    model = llama(intermediate_size=80)
    done = halfstep.export(model, tmp_path / "a", recipe="mxfp8")
    assert done.kept == {
        f"model.layers.{i}.mlp.down_proj": "its weight is 128x80, and mxfp8 takes an input of a multiple of 32"
        for i in range(2)
    }
    config = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert sorted(config["ignore"]) == sorted([*done.kept, "lm_head"])
    twin = copy.deepcopy(model)
    halfstep.quantize_model(twin, "mxfp8")
    loaded = stock(tmp_path / "a", "mxfp8").model.layers[1].mlp.down_proj
    assert_same(loaded.weight, twin.model.layers[1].mlp.down_proj.weight)
    done = halfstep.export(llama(num_key_value_heads=1), tmp_path / "b", "fp8-block", recipe="fp8-block")
    assert "servers put it together with" in done.kept["model.layers.0.self_attn.q_proj"]
    assert set(done.quantized) & {"model.layers.0.mlp.up_proj", "model.layers.0.self_attn.o_proj"}


def test_shards_dtype_ties_and_biases(tmp_path):
    model = llama(tie_word_embeddings=True, attention_bias=True)
    halfstep.export(model, tmp_path / "a", recipe="fp8-rowwise", dtype="bf16", max_shard_size="60KB")
    names = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(names.values())) > 2
    assert "lm_head.weight" not in names
    loaded, twin = stock(tmp_path / "a", "fp8-channel"), copy.deepcopy(model)
    halfstep.quantize_model(twin, "fp8-rowwise")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(loaded.lm_head.weight, model.lm_head.weight.bfloat16().float())
    assert_same(loaded.model.layers[1].mlp.up_proj.weight, twin.model.layers[1].mlp.up_proj.weight)
    assert_same(loaded.model.layers[0].self_attn.q_proj.bias, model.model.layers[0].self_attn.q_proj.bias.detach())
    with safe_open(tmp_path / "a" / sorted(set(names.values()))[0], "pt") as file:
        shapes = {key: (file.get_tensor(key).dtype, file.get_tensor(key).shape) for key in file.keys()}  # noqa: SIM118
    assert shapes["model.embed_tokens.weight"][0] == torch.bfloat16


def test_weights_that_are_not_finite_are_named(tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(LayoutError, match=r"model.layers.1.mlp.up_proj.weight: a scale is no finite number"):
        halfstep.export(model, tmp_path / "a", recipe="mxfp8")
