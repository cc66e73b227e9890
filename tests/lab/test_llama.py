"""The lab's Llama equals transformers', and Smooth-SwiGLU finds its gated MLPs."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import halfstep
from halfstep.lab.models.llama import Llama
from halfstep.nn import measure_smooth_scales


pytestmark = pytest.mark.cpu


def build():
    torch.manual_seed(0)
    return Llama(64, 32, layers=2, width=48, heads=3)


def test_equals_transformers_with_the_same_weights():
    model = build()
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=3
    )
    theirs = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at initialization, so that positions and gates matter
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 2 else 1.0))
    prefixed = {k if k == "lm_head.weight" else f"model.{k}": v for k, v in model.state_dict().items()}
    theirs.load_state_dict(prefixed)
    ids = torch.randint(64, (3, 32))
    mine, expected = model(ids), theirs(ids).logits
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))
    mine.square().mean().backward()
    expected.square().mean().backward()
    others = {name.removeprefix("model."): parameter for name, parameter in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        other = others.pop(name)
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5 * scale, msg=name)
    assert not others


def test_gated_mlps_are_smoothed_and_quantized():
    model = build()
    ids = torch.randint(64, (3, 32))
    assert halfstep.apply(model, "fp8-smooth-swiglu").smoothed == ("layers.0.mlp", "layers.1.mlp")
    scales = measure_smooth_scales(model, lambda: model(ids))
    report = halfstep.quantize_model(model, "fp8-smooth-swiglu", smooth=scales)
    assert len(report.quantized) == 14
    assert report.kept == {"lm_head": "output head"}


@pytest.mark.slow  # fast: cli/test_compare.py with other models, conformance/test_every_task.py
@pytest.mark.parametrize("model", ["llama-tiny"])
def test_llama_in_halfstep_compare(model, tmp_path, run, monkeypatch, unrendered):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    options = ["--data", "text.txt", "--steps", "3", "--batch", "2", "--context", "16", "--baseline-seeds", "1"]
    recipes = "fp32,fp8-smooth-swiglu"
    code, out, _ = run("compare", "--model", model, "--recipes", recipes, *options, "--out", "runs/x", "--json")
    assert code == 0
    assert [v["recipe"] for v in json.loads(out)["verdicts"]] == recipes.split(",")
