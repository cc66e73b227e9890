"""Folders published by others in 8 and 4 bits: codes load unchanged, decode as in transformers, compressed-tensors and
the layout's formula, and LoRA trains beside them."""

import json
import re
import shutil
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_export import IDS, ROWS, llama, stock
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging

import halfstep
from halfstep.errors import CheckpointError
from halfstep.memory import stored_bytes


logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's


def lora(base):
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base, config).train()


def anonymous(folder, rename=lambda name: name, change=lambda tensors: tensors):
    """The folder rewritten as by another tool: without halfstep's metadata, and with other names."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change({rename(n): t for n, t in tensors.items()}), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def folder(tmp_path):
    def made(layout):
        halfstep.export(llama(), tmp_path / layout, layout, recipe=ROWS[layout])
        return anonymous(tmp_path / layout)

    return made


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.quick("deepseek-fp8", "fp8-tensor", "nvfp4")
@pytest.mark.parametrize("layout", ROWS)
def test_weights_equal_those_decoded_by_transformers(layout, folder):
    where = folder(layout)
    model, expected = halfstep.from_pretrained(where), stock(where, layout)
    for name, layer in linears(expected).items():
        assert torch.equal(model.get_submodule(name).weight, layer.weight.to(torch.bfloat16)), name
    codes = load_file(where / "model.safetensors")
    held = model.get_submodule("model.layers.0.mlp.up_proj").weight_codes
    stored = codes.get("model.layers.0.mlp.up_proj.weight_packed", codes.get("model.layers.0.mlp.up_proj.weight"))
    assert torch.equal(held.view(torch.uint8), stored.view(torch.uint8)), "codes as they lie"
    with torch.no_grad():
        ours, theirs = model(IDS).logits.float(), expected.to(torch.bfloat16)(IDS).logits.float()
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_fp8_blocks_are_codes_times_scales(tmp_path):
    """DeepSeek's layout by its formula, for sizes that end within a block."""
    model = llama(hidden_size=160, intermediate_size=200, num_attention_heads=2, head_dim=80)
    model.save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        rows, columns = (-(-size // 128) for size in weight.shape)
        scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name))) * 1e-3 + 1e-3
        whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / whole).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        expected[name] = (tensors[name].double() * whole.double()).to(torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = halfstep.from_pretrained(tmp_path)
    for name, values in expected.items():
        assert torch.equal(found.get_submodule(name.removesuffix(".weight")).weight, values), name


def test_modelopt_names_are_read(tmp_path, folder):
    plain = halfstep.from_pretrained(folder("nvfp4"))

    def modelopt(tensors):
        made = {}
        for name, tensor in tensors.items():
            if name.endswith("weight_packed"):
                made[name.removesuffix("_packed")] = tensor
                made[name.replace("weight_packed", "input_scale")] = torch.ones(1)
            elif name.endswith("weight_global_scale"):
                made[name.replace("global_scale", "scale_2")] = tensor.reciprocal()
            else:
                made[name] = tensor
        return made

    where = anonymous(shutil.copytree(tmp_path / "nvfp4", tmp_path / "modelopt"), change=modelopt)
    for name, layer in linears(halfstep.from_pretrained(where)).items():
        assert torch.equal(layer.weight, plain.get_submodule(name).weight), name


def gpt_oss(folder):
    """A mixture of experts with MXFP4 stacks, and the values transformers decodes from them."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_local_experts=4,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 122, (experts, rows, columns // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return expected


def test_gpt_oss_expert_stacks_stay_mxfp4(tmp_path):
    expected = gpt_oss(tmp_path)
    model = halfstep.from_pretrained(tmp_path, adapters=True)
    for name, values in expected.items():
        path, _, last = name.rpartition(".")
        assert torch.equal(getattr(model.get_submodule(path), last), values), name
    stocks = GptOssForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)  # decoded on a CPU
    with torch.no_grad():
        ours, theirs = model(IDS).logits.float(), stocks(IDS).logits.float()
    assert (ours - theirs).norm() < 0.05 * theirs.norm()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)


@pytest.mark.quick("deepseek-fp8")
@pytest.mark.parametrize("layout", ["deepseek-fp8", "fp8-channel", "mxfp4", "nvfp4"])
def test_lora_trains_on_frozen_codes(layout, folder, tmp_path):
    """Gradients equal those of the decoded weights, codes do not change, and adapters load in PEFT."""
    where = folder(layout)
    torch.manual_seed(1)
    model = lora(halfstep.from_pretrained(where, adapters=True))
    torch.manual_seed(1)
    decoded = lora(stock(where, layout, torch.float32))
    for ours, theirs in zip(parameters(model), parameters(decoded), strict=True):
        with torch.no_grad():
            ours.copy_(theirs.copy_(torch.randn(theirs.shape, generator=torch.Generator().manual_seed(3)) * 0.02))
    model(input_ids=IDS, labels=IDS).loss.backward()
    decoded(input_ids=IDS, labels=IDS).loss.backward()
    for ours, theirs in zip(parameters(model), parameters(decoded), strict=True):
        assert (ours.grad - theirs.grad).norm() < 0.05 * theirs.grad.norm()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer, scaler = halfstep.optimize(model, torch.optim.AdamW(parameters(model), lr=1e-2))
    for _ in range(3):
        scaler.scale(model(input_ids=IDS, labels=IDS).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    model.save_pretrained(tmp_path / "adapters")
    again = PeftModel.from_pretrained(halfstep.from_pretrained(where, adapters=True), tmp_path / "adapters")
    assert torch.equal(again.eval()(IDS).logits, model.eval()(IDS).logits)


def parameters(model):
    return [p for p in model.parameters() if p.requires_grad]


class Alive(TorchDispatchMode):
    """A mode that counts live floating-point tensors of at least 16 bits and `size` elements; `most` is the peak."""

    def __init__(self, size):
        super().__init__()
        self.size, self.alive, self.most = size, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            wide = isinstance(t, torch.Tensor) and t.is_floating_point() and t.itemsize > 1 and not t.is_meta
            if wide and t.numel() >= self.size:
                self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(t)]
                self.most = max(self.most, len(self.alive))
        return out


def test_loading_holds_no_decoded_weights(folder):
    """At most one layer's weight is allocated at a time (and never written), while its module is built; 6 of the 14
    layers are that large."""
    where = folder("deepseek-fp8")
    with Alive(128 * 256) as seen:
        model = halfstep.from_pretrained(where)
    assert seen.most <= 2
    assert stored_bytes(model) < 0.7 * stored_bytes(llama().to(torch.bfloat16))


def test_unknown_or_broken_folders_raise(tmp_path, folder):
    where = folder("deepseek-fp8")
    scale = "model.layers.0.mlp.up_proj.weight_scale_inv"
    broken = anonymous(shutil.copytree(where, tmp_path / "a"), change=lambda t: {**t, scale: torch.ones(3, 5)})
    with pytest.raises(CheckpointError, match=rf"scales {re.escape(scale)} of shape \(3, 5\) do not fit together"):
        halfstep.from_pretrained(broken)
    other = anonymous(
        shutil.copytree(where, tmp_path / "b"),
        change=lambda t: {n: v.float() for n, v in t.items() if not n.endswith("_scale_inv")},
    )
    with pytest.raises(CheckpointError, match=r"no weights in known codes .*expected FP8 of DeepSeek"):
        halfstep.from_pretrained(other)
    missing = anonymous(
        shutil.copytree(where, tmp_path / "c"), change=lambda t: {n: v for n, v in t.items() if "norm" not in n}
    )
    with pytest.raises(CheckpointError, match="missing"):
        halfstep.from_pretrained(missing)


def test_experts_that_transformers_concatenates_raise(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"transformers joins model.layers.0.*experts.* with others when it load"):
        halfstep.from_pretrained(tmp_path)
