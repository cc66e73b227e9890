"""Exported models load in stock transformers on a CPU, with weights equal to ours bit for bit."""

import copy
import inspect
import json
import shutil
import warnings
from importlib.metadata import version
from pathlib import Path

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    CompressedTensorsConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.core_model_loading import Chunk, WeightConverter
from transformers.utils import logging

import halfstep
from halfstep.errors import CheckpointError, LayoutError, ModelError, RecipeError
from halfstep.layouts import list_layouts
from halfstep.nn.pretrained import KEY
from halfstep.recipe import get_recipe, list_recipes
from halfstep.serving import layouts_of
from tiny import assert_same


logging.disable_progress_bar()
IDS = torch.arange(40).view(2, 20)
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
slow = lambda value: pytest.param(value, marks=pytest.mark.slow)  # noqa: E731
every_layout = pytest.mark.parametrize("layout", ROWS)


def llama(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options}))


def contents(folder):
    """The tensors and metadata of the weights file, and config.json."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = {key: file.get_tensor(key).contiguous() for key in sorted(file.keys())}
        tensors = {k: (str(t.dtype), t.shape, t.view(torch.uint8).numpy().tobytes()) for k, t in found.items()}
        return tensors, file.metadata(), (folder / "config.json").read_text()


def stock(folder, layout, dtype=torch.float32, auto=AutoModelForCausalLM):
    """The exported model as transformers loads it."""
    if layout in ("fp8-block", "mxfp4") and version("compressed-tensors").startswith("0.15."):
        pytest.skip(f"compressed-tensors 0.15 does not decode {layout}")
    takes = inspect.signature(CompressedTensorsConfig).parameters
    decoded = {"dequantize": True} if "dequantize" in takes else {"run_compressed": False}  # since transformers 5.8
    options = {} if layout == "deepseek-fp8" else {"quantization_config": CompressedTensorsConfig(**decoded)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, told = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return model.to(dtype)  # compressed-tensors 0.15 decodes mxfp8 to bf16, without loss


@pytest.mark.quick("fp8-block", "mxfp4")
@pytest.mark.quick("fp8-tensor", "mxfp4", "fp8-block")
@every_layout
def test_transformers_loads_our_rounded_weights(layout, tmp_path):
    model = llama()
    halfstep.quantize_model(model, ROWS[layout])
    done = halfstep.export(model, tmp_path / "served", layout)
    assert (done.format, done.recipe, done.kept) == (layout, ROWS[layout], {})
    loaded = stock(tmp_path / "served", layout)
    # compressed-tensors decodes NVFP4 in bf16, whatever dtype is asked for
    dtype = torch.bfloat16 if layout == "nvfp4" else torch.float32
    changed = 0
    for path in done.quantized:
        assert_same(loaded.get_submodule(path).weight.to(dtype), model.get_submodule(path).weight.clone().to(dtype))
        changed += not torch.equal(loaded.get_submodule(path).weight, llama().get_submodule(path).weight)
    assert changed == len(done.quantized) > 5
    assert_same(loaded.lm_head.weight, llama().lm_head.weight)
    with safe_open(tmp_path / "served" / "model.safetensors", "pt") as file:
        said = json.loads(file.metadata()[KEY])
    assert (said["halfstep"], said["recipe"]["name"], said["layout"]) == (halfstep.__version__, done.recipe, layout)


def test_stock_applied_and_quantized_models_export_equally(tmp_path):
    followed, quantized = llama(), llama()
    halfstep.apply(followed, "fp8-rowwise")
    halfstep.quantize_model(quantized, "fp8-rowwise")
    halfstep.export(llama(), tmp_path / "a", "fp8-channel", recipe="fp8-rowwise")
    halfstep.export(followed, tmp_path / "b")
    quantized.save_pretrained(tmp_path / "c")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert "_halfstep" in vars(followed)  # the model itself is unchanged
    assert followed.model.layers[0].mlp.up_proj.weight.requires_grad


def test_unsupported_recipes_and_layouts_raise(tmp_path):
    words = (
        r"recipe 'fp8-block' rounds weights to float8_e4m3fn \(rceil, 128x128\), which the layout 'fp8-channel' does"
    )
    with pytest.raises(LayoutError, match=words + r".*Layouts that do: fp8-block, deepseek-fp8, mxfp8"):
        halfstep.export(llama(), tmp_path / "a", "fp8-channel", recipe="fp8-block")
    with pytest.raises(LayoutError, match=r"recipe 'fp8-amax' rounds weights in a way that no layout holds"):
        halfstep.export(llama(), tmp_path / "a", recipe="fp8-amax")
    with pytest.raises(LayoutError, match=r"unknown format 'fp8-chanel'; nearest: fp8-channel"):
        halfstep.export(llama(), tmp_path / "a", "fp8-chanel", recipe="fp8-block")
    with pytest.raises(RecipeError, match=r"follows no recipe, which would say how to round its weights: give one"):
        halfstep.export(llama(), tmp_path / "a")
    mixed = llama()
    halfstep.apply(mixed, "bf16-mixed")
    with pytest.raises(RecipeError, match=r"rounds no weights in its matmuls: model.save_pretrained\(folder\) writes"):
        halfstep.export(mixed, tmp_path / "a")
    with pytest.raises(ModelError, match=r"this Linear is not a Hugging Face model"):
        halfstep.export(torch.nn.Linear(8, 8), tmp_path / "a", recipe="mxfp8")
    with pytest.raises(LayoutError, match=r"left no factor of its input.*: the model was not trained under it before"):
        halfstep.export(llama(), tmp_path / "a", "fp8-static", recipe="fp8-delayed")
    with pytest.raises(LayoutError, match=r"left no factor of its input.*: no step leaves a factor of the inputs"):
        halfstep.export(llama(), tmp_path / "a", "fp8-static", recipe="fp8-current")
    assert not list(tmp_path.iterdir())


def test_nonempty_folder_is_not_overwritten(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match=r"exists and is not empty; name a new folder"):
        halfstep.export(llama(), tmp_path, recipe="mxfp8")
    with pytest.raises(CheckpointError, match=r"is not there, or read-only"):
        halfstep.export(llama(), tmp_path / "no" / "where", recipe="mxfp8")
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_failed_export_leaves_no_folder(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("halfstep.layouts.folder.save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device"):
        halfstep.export(llama(), tmp_path / "a", recipe="mxfp8")
    assert not list(tmp_path.iterdir())


def test_layers_that_do_not_fit_stay_unquantized_and_are_ignored(tmp_path):
    """down_proj's 80 inputs are no whole blocks of 32; k_proj's 64 outputs no block of 128, and q and v follow it."""
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
    assert_same(loaded.weight, twin.model.layers[1].mlp.down_proj.weight.clone())
    done = halfstep.export(llama(num_key_value_heads=1), tmp_path / "b", "fp8-block", recipe="fp8-block")
    assert "servers put it together with" in done.kept["model.layers.0.self_attn.q_proj"]
    assert set(done.quantized) & {"model.layers.0.mlp.up_proj", "model.layers.0.self_attn.o_proj"}


def test_export_with_shards_dtype_ties_and_biases(tmp_path):
    model = llama(tie_word_embeddings=True, attention_bias=True)
    halfstep.export(model, tmp_path / "a", recipe="fp8-rowwise", dtype="bf16", max_shard_size="60KB")
    names = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(names.values())) > 2
    assert "lm_head.weight" not in names
    loaded, twin = stock(tmp_path / "a", "fp8-channel"), copy.deepcopy(model)
    halfstep.quantize_model(twin, "fp8-rowwise")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(loaded.lm_head.weight, model.lm_head.weight.bfloat16().float())
    assert_same(loaded.model.layers[1].mlp.up_proj.weight, twin.model.layers[1].mlp.up_proj.weight.clone())
    assert_same(loaded.model.layers[0].self_attn.q_proj.bias, model.model.layers[0].self_attn.q_proj.bias.detach())
    with safe_open(tmp_path / "a" / sorted(set(names.values()))[0], "pt") as file:
        shapes = {key: (file.get_tensor(key).dtype, file.get_tensor(key).shape) for key in file.keys()}  # noqa: SIM118
    assert shapes["model.embed_tokens.weight"][0] == torch.bfloat16


def test_nonfinite_weights_raise(tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(LayoutError, match=r"model.layers.1.mlp.up_proj.weight: a scale is no finite number"):
        halfstep.export(model, tmp_path / "a", recipe="mxfp8")


def test_experts_are_written_unquantized_under_published_names(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    halfstep.quantize_model(model, "mxfp8")
    done = halfstep.export(model, tmp_path / "a")
    assert (list(done.kept), len(done.quantized)) == (["model.layers.0.mlp.experts"], 4)
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in load_file(tmp_path / "a" / "model.safetensors")
    loaded, own = stock(tmp_path / "a", "mxfp8").model.layers[0], model.model.layers[0]
    assert_same(loaded.mlp.experts.gate_up_proj, own.mlp.experts.gate_up_proj.clone())
    assert_same(loaded.mlp.experts.down_proj, own.mlp.experts.down_proj.clone())
    assert_same(loaded.self_attn.q_proj.weight, own.self_attn.q_proj.weight.clone())
    with pytest.raises(CheckpointError, match=r"is put together from parts of the file.*load it with transformers"):
        halfstep.from_pretrained(tmp_path / "a")


def test_model_without_linear_layers_raises(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
    words = r"layout 'mxfp8' has a place for no layer of this GPT2LMHeadModel: it is a Conv1D, and the layout is one of"
    with pytest.raises(LayoutError, match=words):
        halfstep.export(model, tmp_path / "a", recipe="mxfp8")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # read by PEFT
@pytest.mark.parametrize("first", ["quantise", "peft"])
def test_adapters_are_saved_by_peft_but_not_exported(first, tmp_path):
    model, lora = llama(), peft.LoraConfig(target_modules=["q_proj"])
    if first == "quantise":
        halfstep.quantize_model(model, "mxfp8", adapters=True)
    wrapped = peft.get_peft_model(model, lora)
    if first == "peft":
        halfstep.quantize_model(wrapped, "mxfp8", adapters=True)
    wrapped.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    with pytest.raises(ModelError, match=r"this PeftModel is not a Hugging Face model.*merge_and_unload"):
        halfstep.export(wrapped, tmp_path / "a")
    with pytest.raises(
        (LayoutError, ModelError, RecipeError), match=r"belongs to an adapter|is not a whole|follows no recipe"
    ):
        halfstep.export(wrapped.get_base_model(), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_unit_scaled_models_raise(tmp_path):
    model = llama()
    halfstep.unit_scale(model, IDS)
    with pytest.raises(LayoutError, match=r"LlamaForCausalLM is unit-scaled: its matmuls have factors"):
        halfstep.export(model, tmp_path / "a", recipe="unit-fp8")


# ---- served models compute what ours do, up to rounding of inputs ----------------------------------------------------


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


@pytest.mark.quick("mxfp8")
@pytest.mark.parametrize("layout", ["fp8-channel", "mxfp8"])
def test_served_logits_are_within_quantization_error_of_ours(layout, tmp_path):
    """transformers does not round inputs on a CPU, ours does; the top token may differ if the first two are close."""
    full, model = llama(), llama()
    halfstep.quantize_model(model, ROWS[layout])
    model.save_pretrained(tmp_path / "served")
    served, ours, exact = logits(stock(tmp_path / "served", layout)), logits(model), logits(full)
    assert 0 < (served - ours).norm() < (ours - exact).norm()
    bound = 2 * float((ours - exact).abs().max())
    assert (served - ours).abs().max() < bound
    first, second = ours.topk(2).values.unbind(-1)
    clear = first - second > bound
    assert clear.any()
    assert_same(served.argmax(-1)[clear], ours.argmax(-1)[clear])


def trained(recipe):
    model, data = llama(), {"input_ids": IDS, "labels": IDS}
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    for _ in range(2):
        scaler.scale(model(**data).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def test_static_layout_uses_the_trained_input_scales(tmp_path):
    model = trained("fp8-delayed")
    done = halfstep.export(model, tmp_path / "served", "fp8-static")
    halfstep.quantize_model(model, "fp8-delayed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        served = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.float32)
    seen = {}
    for path in done.quantized:
        hook = lambda module, inputs, output, path=path: seen.update({path: (inputs[0], output)})  # noqa: E731
        served.get_submodule(path).register_forward_hook(hook)
    logits(served)
    for path, (x, y) in seen.items():
        own = model.get_submodule(path)
        factor = own._halfstep_scaling_input
        rounded = halfstep.round_to(x * factor, "e4m3fn") / factor
        torch.testing.assert_close(y, rounded @ own.weight.t(), rtol=1e-3, atol=1e-4)
        assert (y - x @ own.weight.t()).norm() > 10 * (y - rounded @ own.weight.t()).norm()
    assert seen.keys() == {*done.quantized}


# ---- read back ------------------------------------------------------------------------------------------------------


@pytest.mark.quick("nvfp4", "fp8-delayed")
@pytest.mark.parametrize(
    "recipe", ["fp8-delayed", "fp8-block", "nvfp4", "fp4-wang", *map(slow, ["mxfp8", "mxfp4", "fp8lm-o2", "coat"])]
)
def test_exported_folder_loads_bit_for_bit(recipe, tmp_path):
    model = trained(recipe)
    halfstep.export(model, tmp_path / "served", max_shard_size="200KB")
    before = torch.get_rng_state()
    again = halfstep.from_pretrained(tmp_path / "served")
    assert_same(torch.get_rng_state(), before)
    halfstep.quantize_model(model, recipe)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(logits(again), logits(model))
    again.save_pretrained(tmp_path / "twice")
    assert_same(logits(halfstep.from_pretrained(tmp_path / "twice")), logits(model))


def edited(folder, change):
    """Rewrite the folder's weights file after `change` to its tensors and its halfstep metadata."""
    file = folder / "model.safetensors"
    said = json.loads(safe_open(file, "pt").metadata()[KEY])
    tensors = load_file(file)
    change(tensors, said)
    save_file(tensors, file, metadata={"format": "pt", KEY: json.dumps(said)})


Q = "model.layers.0.self_attn.q_proj"
EDITS = {
    "a layer that is not there": (lambda t, said: said["layers"].update(x=said["layers"][Q]), "cannot be read"),
    "a quantizer that is not there": (lambda t, said: said["layers"][Q].update(quantizer=7), "cannot be read"),
    "another shape": (lambda t, said: said["layers"][Q].update(shape=[64, 256]), r"weight: .* found; fp8-tensor of"),
    "a shape of anything": (lambda t, said: said["layers"][Q].update(shape="ab"), "cannot be read"),
    "another dtype": (lambda t, said: said["layers"][Q].update(dtype="object"), "dtype 'object' found"),
    "another layout": (lambda t, said: said.update(layout="fp9"), "unknown layout 'fp9'"),
    "another recipe": (lambda t, said: said["recipe"].update(compute="int3"), "compute"),
    "no recipe": (lambda t, said: said.pop("recipe"), "recipe"),
    "a missing tensor": (lambda t, said: t.pop("lm_head.weight"), "lm_head.weight missing"),
    "a tensor too many": (lambda t, said: t.update(x=torch.ones(2)), "nothing missing, x unexpected"),
    "a missing scale": (lambda t, said: t.pop(f"{Q}.weight_scale"), "weight_scale: nothing found"),
    "a tensor of another shape": (lambda t, said: t.update({"lm_head.weight": torch.ones(2)}), "is of shape"),
}


def test_edited_folders_raise(tmp_path):
    halfstep.export(llama(), tmp_path / "good", recipe="fp8-current")
    for name, (change, words) in EDITS.items():
        folder = shutil.copytree(tmp_path / "good", tmp_path / name)
        edited(folder, change)
        with pytest.raises(CheckpointError, match=words):
            halfstep.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("Linear", "os", "AutoModel", ["LlamaForCausalLM"], None):
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        with pytest.raises(CheckpointError, match=r"names the architecture|unexpected"):
            halfstep.from_pretrained(folder)
    llama().save_pretrained(tmp_path / "stock")
    with pytest.raises(
        CheckpointError, match=r"no quantization_config: they are not quantised. Load it with transformers"
    ):
        halfstep.from_pretrained(tmp_path / "stock")


# ---- layout names-----------------------------------------------------------------------------------------------------


SCHEMES = {"deepseek-fp8": "fine-grained FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}


@pytest.mark.quick("deepseek-fp8", "nvfp4")
@every_layout
def test_inspect_recognises_the_layout(layout, tmp_path):
    done = halfstep.export(llama(), tmp_path / "served", layout, recipe=ROWS[layout])
    report = halfstep.inspect(tmp_path / "served")
    assert {found.scheme for found in report.schemes} == {SCHEMES.get(layout, "FP8")}
    assert sum(found.layers for found in report.schemes) == len(done.quantized)
    assert (report.findings, report.contradictions) == ((), ())


# ---- documentation --------------------------------------------------------------------------------------------------


def table():
    """The table of docs/export.md: the formats that can hold each recipe's weights."""
    found = {name: layouts_of(get_recipe(name)) for name in list_recipes()}
    rows = [
        f"| `{n}` | {', '.join(f'`{layout.name}`' for layout in layouts)} |" for n, layouts in found.items() if layouts
    ]
    return "\n".join(["| recipe | formats that hold its weights |", "| --- | --- |", *rows])


def test_documentation_has_the_table_of_recipes():
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    assert table() == page.split("<!-- begin: recipes -->\n")[1].split("\n<!-- end: recipes -->")[0]


def test_layouts_that_are_no_recipes_first_choice():
    first = {layouts[0].name for n in list_recipes() if (layouts := layouts_of(get_recipe(n)))}
    assert {*list_layouts()} - first == {"fp8-static", "deepseek-fp8"}


def renamed(kind):
    """A model whose files use other names than its modules, the class that loads it, and its inputs."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    pixels = torch.randn(1, 3, 16, 16)
    if kind == "vit":
        model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes))
        return model.eval(), AutoModelForImageClassification, {"pixel_values": pixels}
    seen = CLIPVisionConfig(image_size=16, patch_size=8, **sizes)
    config = LlavaConfig(vision_config=seen, text_config=LlamaConfig(vocab_size=64, **sizes), image_token_index=63)
    ids = torch.tensor([[1, *[63] * 4, 2, 3]])
    model = LlavaForConditionalGeneration(config)
    return model.eval(), AutoModelForImageTextToText, {"pixel_values": pixels, "input_ids": ids}


@pytest.mark.quick("fp8-channel-vit", "mxfp4-llava")
@pytest.mark.parametrize("kind", ["vit", "llava"])
@every_layout
def test_model_with_renamed_tensors_in_files(layout, kind, tmp_path):
    model, auto, inputs = renamed(kind)
    full = copy.deepcopy(model)
    halfstep.quantize_model(model, ROWS[layout], lambda module, path: isinstance(module, nn.Linear))
    done = halfstep.export(model, tmp_path / "served", layout)
    full.save_pretrained(tmp_path / "stock")
    names = {name.rpartition(".")[0] for name in load_file(tmp_path / "stock" / "model.safetensors")}
    assert {name.rpartition(".")[0] for name in load_file(tmp_path / "served" / "model.safetensors")} == names
    assert done.quantized
    assert not names >= {*done.quantized}
    config = json.loads((tmp_path / "served" / "config.json").read_text())["quantization_config"]
    left = {*config.get("ignore", config.get("modules_to_not_convert", ()))}
    head = {"vit": {"classifier"}, "llava": {"lm_head", "language_model.lm_head"}}[kind]
    assert head <= left <= names | {path for path, m in full.named_modules() if isinstance(m, nn.Linear)}
    again = halfstep.from_pretrained(tmp_path / "served")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    with torch.no_grad():
        assert_same(again(**inputs).logits, model(**inputs).logits)
    loaded, dtype = (
        stock(tmp_path / "served", layout, auto=auto),
        torch.bfloat16 if layout == "nvfp4" else torch.float32,
    )
    for path in done.quantized:
        assert_same(loaded.get_submodule(path).weight.to(dtype), model.get_submodule(path).weight.clone().to(dtype))


def test_convolutions_are_written_as_rounded_values(tmp_path):
    model, _, _ = renamed("vit")
    path = "vit.embeddings.patch_embeddings.projection"
    full = model.get_submodule(path).weight.detach().clone()
    done = halfstep.export(model, tmp_path / "served", recipe="fp8-current")
    assert done.kept == {path: "it is a Conv2d, and the layout is one of nn.Linear"}
    quantizer = get_recipe("fp8-current").rules[-1].linear.output.rhs  # of the whole tensor
    written = load_file(tmp_path / "served" / "model.safetensors")[f"{path}.weight"]
    assert_same(written, quantizer(full))
    assert not torch.equal(written, full)
    assert_same(halfstep.from_pretrained(tmp_path / "served").get_submodule(path).weight.detach(), written)


def test_weights_that_files_concatenate_raise(tmp_path):
    model = llama()
    own = [f"{name}_proj.weight" for name in "qkv"]
    model._weight_conversions = [WeightConverter("qkv.weight", own, [Chunk(dim=0)])]
    with pytest.raises(
        LayoutError, match=r"layers.0.self_attn.q_proj of Llama.*files concatenate its weight.*load that into a"
    ):
        halfstep.export(model, tmp_path / "a", recipe="fp8-rowwise")
    assert not (tmp_path / "a").exists()
