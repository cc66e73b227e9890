"""`halfstep export`: written folders and files, copied files, the list of formats, and bad arguments."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import halfstep
from halfstep.cli.app import app
from halfstep.errors import CheckpointError, LayoutError, RecipeError


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_text("not for servers")
    return folder


def run(*words):
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_exported_folder(source, tmp_path):
    out = run(source, tmp_path / "a", "--recipe", "fp8-rowwise").stdout
    assert f"{tmp_path / 'a'}: fp8-channel, as fp8-rowwise rounds it" in out
    assert "in codes: 7 layers" in out
    names = {file.name for file in (tmp_path / "a").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"}
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16  # the dtype of the folder
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    assert halfstep.from_pretrained(tmp_path / "a").lm_head.weight.dtype == torch.float32


def test_gguf_file_and_json_output(source, tmp_path):
    words = (source, tmp_path / "m.gguf", "--recipe", "mxfp4", "--format", "gguf-mxfp4", "--json")
    data = json.loads(run(*words).stdout)
    assert (data["format"], data["recipe"], len(data["quantized"])) == ("gguf-mxfp4", "mxfp4", 7)
    assert data["nbytes"] == (tmp_path / "m.gguf").stat().st_size
    assert "no tokenizer: llama.cpp takes" in run(source, tmp_path / "f32.gguf", "--format", "gguf-f32").stdout


def test_list_of_formats():
    assert json.loads(run("--list", "--recipe", "fp8-rowwise", "--json").stdout)[0]["name"] == "fp8-channel"
    assert "gguf-q8_0" in run("--list").stdout
    assert "deepseek-fp8" in run("--list").stdout


def test_bad_arguments_raise_before_the_model_is_loaded(source, tmp_path):
    with pytest.raises(LayoutError, match=r"unknown format 'fp9'"):
        run("no-such-model", tmp_path / "a", "--format", "fp9")
    with pytest.raises(CheckpointError, match=r"exists and is not empty"):
        run("no-such-model", source)
    with pytest.raises(CheckpointError, match=r"dtype 'int8' found"):
        run("no-such-model", tmp_path / "a", "--dtype", "int8")
    with pytest.raises(RecipeError, match=r"follows no recipe"):
        run(source, tmp_path / "a")
    assert run().exit_code == 2
    assert not list(tmp_path.iterdir())
