"""Buffers of Hugging Face models after `model.bfloat16()`: rounded rotary frequencies are found, harmless ones not."""

import warnings

import pytest
import torch

import halfstep
from halfstep.probe.cast import Buffers, rounded_buffers
from halfstep.probe.trial import reference, sensitivity


transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

BF16 = 2.0**-8
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
ROTARY = {  # class: configuration, suffix of the buffer's name
    "LlamaForCausalLM": (SIZES, "inv_freq"),
    "GPTNeoXForCausalLM": (SIZES, "inv_freq"),
    "GemmaForCausalLM": ({**SIZES, "num_key_value_heads": 2, "head_dim": 32}, "inv_freq"),
}
SPATIAL = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
SEQ2SEQ = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
HARMLESS = {  # T5's buckets, ALiBi, learned positions and their ids, batch norm statistics
    "T5ForConditionalGeneration": {**SEQ2SEQ, "decoder_start_token_id": 0},
    "BloomForCausalLM": {"vocab_size": 64, "hidden_size": 48, "n_layer": 2, "n_head": 12},
    "MptForCausalLM": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64},
    "GPT2LMHeadModel": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
    "OPTForCausalLM": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 64},
    "BertForMaskedLM": SIZES,
    "ResNetForImageClassification": SPATIAL,
    "RegNetForImageClassification": {**SPATIAL, "groups_width": 8},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25},
    "EfficientNetForImageClassification": {
        "width_coefficient": 0.25, "depth_coefficient": 0.25, "image_size": 64, "hidden_dim": 320
    },
    "MobileViTForImageClassification": {
        "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]
    },
}  # fmt: skip


def build(name, config):
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config)).eval()


def inputs(model, length=512):
    if model.main_input_name != "pixel_values":
        ids = torch.randint(3, 64, (1, length))
        return {"input_ids": ids, "labels": ids}
    model.train()  # so that statistics are not zeros and ones
    with torch.no_grad():
        for _ in range(4):
            model(pixel_values=0.5 + torch.randn(4, 3, 64, 64))
    model.eval()
    return {"pixel_values": torch.randn(4, 3, 64, 64)}


def measured(model, batch):
    expected = reference(model, batch, None)
    weights = sensitivity(model, batch, None, expected, BF16).output_error
    return Buffers(rounded_buffers(model, batch, torch.bfloat16, expected), weights, BF16)


def warned(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        halfstep.apply(model, "bf16-mixed")
    return [str(each.message) for each in caught if "buffers arrive rounded" in str(each.message)]


@pytest.mark.parametrize("name", ROTARY)
def test_rounded_rotary_frequencies_are_found_by_probe_apply_and_audit(name):
    config, last = ROTARY[name]
    model = build(name, config)
    (found,) = measured(model, inputs(model)).harmful
    assert found.name.endswith(last)
    assert found.error > 4 * BF16
    model.bfloat16()
    assert any(found.name in one.tensors for one in halfstep.audit(model).findings)
    assert len(warned(model)) == 1
    assert warned(build(name, config)) == []


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_buffers_give_no_finding(name):
    model = build(name, HARMLESS[name])
    found = measured(model, inputs(model, 64))
    assert found.harmful == (), found
    if name.endswith("ImageClassification"):
        assert len(found.found) > 3  # batch norm statistics change by at most one rounding
    model.bfloat16()
    assert [one for one in halfstep.audit(model).findings if one.what == "rounded buffers"] == []
    assert warned(model) == []


def test_sinusoidal_table_is_named_and_its_error_measured():
    config = {"vocab_size": 64, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2}
    model = build("XGLMForCausalLM", config)
    found = measured(model, inputs(model, 64))
    assert [one.name for one in found.found] == ["model.embed_positions.weights"]
    assert found.harmful == ()  # added once: an error of one rounding
    assert "embed_positions.weights" in warned(model.bfloat16())[0]
