"""Mixtures of experts, state-space and vision models from small configs are probed without false alarms."""

import pytest
import torch

import halfstep


transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**WIDTHS, "vocab_size": 64, "num_key_value_heads": 2}
VISION = {**WIDTHS, "image_size": 16, "patch_size": 4}
CONFIGS = {
    "Qwen3MoeForCausalLM": {**TEXT, "moe_intermediate_size": 32, "num_experts": 64, "head_dim": 16},
    "MixtralForCausalLM": {**TEXT, "num_local_experts": 4},
    "DeepseekV3ForCausalLM": {
        **TEXT, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_nope_head_dim": 8, "first_k_dense_replace": 1,
    },
    "GptOssForCausalLM": {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "MambaForCausalLM": {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    "ViTForImageClassification": VISION,
    "CLIPVisionModel": VISION,
}  # fmt: skip


def build(name):
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    return kind(kind.config_class(**CONFIGS[name])).eval()


def batch(model):
    draw = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=draw)}
    ids = torch.randint(3, 64, (2, 12), generator=draw)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_initialized_model_is_safe(name, to):
    model = build(name)
    report = halfstep.probe_model(model, to, data=[batch(model)])
    assert report.safe, str(report)
    assert report.trial.output_error < 10 * report.sensitivity.output_error
    assert report.noise == ()


def test_unused_experts_are_those_never_routed_to():
    model = build("Qwen3MoeForCausalLM")
    chosen = {}

    def keep(path):
        def look(module, args):  # a row's last token predicts nothing, so its gradient is zero
            chosen.setdefault(path, set()).update(args[1].unflatten(0, (2, 12))[:, :-1].flatten().tolist())

        return look

    experts = {path: m for path, m in model.named_modules() if path.endswith(".experts")}
    handles = [module.register_forward_pre_hook(keep(path)) for path, module in experts.items()]
    model(**batch(model))
    for handle in handles:
        handle.remove()
    wanted = tuple(f"{64 - len(used)} of 64 in {path} (Qwen3MoeExperts)" for path, used in chosen.items())
    assert len(wanted) == 2
    report = halfstep.probe_model(model, data=[batch(model)])
    assert report.conditions.unreached == wanted


def test_vision_model_of_a_function_with_inputs(run, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "import torch, transformers\n"
        f"def build():\n    config = transformers.CLIPVisionConfig(**{VISION})\n"
        "    return transformers.CLIPVisionModel(config), torch.randn(2, 3, 16, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("probe", "own.py:build")
    assert code == 0
    assert "safe: CLIPVisionModel in fp16" in out


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_llama_with_logits_beyond_fp16_keeps_attention_in_float32(attention):
    config = transformers.LlamaConfig(**TEXT, attn_implementation=attention)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 8000
            layer.self_attn.k_proj.weight *= 8000
    report = halfstep.probe_model(model, data=[batch(model)])
    assert not report.safe
    assert report.headroom.counts.largest > 1e6
    assert ".self_attn (LlamaAttention)" in report.first_failure
    assert report.suggestion.recipe.float32_modules == ("model.layers.*.self_attn",)
    assert report.suggestion.output_error < 0.01
    projections = {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "qk"}
    assert set(report.noise) <= projections  # only rounding errors come back through a hard maximum
    assert bool(report.noise) == (attention == "sdpa")  # eager softmax returns exact zeros
