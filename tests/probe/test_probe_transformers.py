"""Reported faults, planted in Hugging Face models: named by module, and fixed by a suggested recipe that was run."""

import pytest
import torch

import halfstep


transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def t5():
    """T5 1.1 (gated): in one block the product of the halves exceeds 65504, and `wo` brings it back."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    ffn = model.encoder.block[1].layer[-1].DenseReluDense
    for layer, gain in ((ffn.wi_0, 500.0), (ffn.wi_1, 500.0), (ffn.wo, 1 / 500**2)):
        layer.weight.data *= gain
    return model


def gemma3():
    """Norms after the feed-forward layers write values near 800,000 into the residual stream."""
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=16)
    model = transformers.Gemma3ForCausalLM(config)
    for layer in model.model.layers:
        layer.post_feedforward_layernorm.weight.data.fill_(2.5e5)
    return model


def llama():
    """The residual stream's last channel is zero in the forward; in the backward each block multiplies its gradient."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    embedding = model.model.embed_tokens.weight.data
    embedding *= 50
    embedding[:, 0], embedding[:, -1] = 350, 0
    for layer in model.model.layers:
        gate, up, down = (getattr(layer.mlp, name).weight.data for name in ("gate_proj", "up_proj", "down_proj"))
        layer.self_attn.o_proj.weight.data[-1] = down[-1] = gate[0] = up[0] = 0
        down[:, 0] = 0
        gate[0, 0], up[0, -1], down[-1, 0] = 1, 300, 300
    return model


def probe(model, to="fp16"):
    ids = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    return halfstep.probe_model(model, to, data=[{"input_ids": ids, "labels": ids}])


def test_t5_keeps_the_overflowing_feed_forward_layer_in_float32():
    report = probe(t5())
    place = "encoder.block.1.layer.1.DenseReluDense"
    assert report.first_failure == f"input of {place}.dropout (Dropout)"
    assert f"first to fail: input of {place}.dropout (Dropout), which is the input of {place}.wo (Linear)" in str(
        report
    )
    assert report.suggestion.recipe.name == "fp16-master-kept"
    assert report.suggestion.recipe.float32_modules == ("encoder.block.*.layer.*.DenseReluDense",)
    assert report.suggestion.output_error < 0.01


def test_gemma3_keeps_norms_of_an_overflowing_residual_stream():
    report = probe(gemma3())
    assert max(found.counts.largest for found in report.residual) > 7e5
    assert report.first_failure == "weight of model.layers.0.post_feedforward_layernorm (Gemma3RMSNorm)"
    assert report.suggestion.recipe.float32_modules == ("model.layers.*.post_feedforward_layernorm",)
    assert report.suggestion.output_error < 0.01
    assert probe(gemma3(), "bf16").safe


def test_residual_stream_that_overflows_only_in_the_backward():
    report = probe(llama())
    assert report.findings == ()
    assert 300 < report.headroom.counts.largest < 400
    assert report.gradient_findings
    assert max(found.counts.largest for found in report.residual if found.site.backward) > 65504
    assert report.first_failure.startswith("gradient of the ")
    assert ".mlp." in report.first_failure
    assert report.window.largest < 1
    assert report.suggestion.recipe.name == "bf16-master"
