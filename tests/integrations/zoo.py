"""Twelve Hugging Face models from small configurations, with a batch each and the names of their heads and routers."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip
T5 = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
VIT = ViTConfig(**{k: v for k, v in SIZES.items() if k != "vocab_size"}, image_size=8, patch_size=4, num_labels=4)
WHISPER = WhisperConfig(
    vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=8, max_target_positions=16,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A model: its class, a small configuration, the layers that are kept, and whether it has gated MLPs."""

    kind: Any
    config: Any
    kept: tuple[str, ...] = ("lm_head",)
    gated: bool = False

    def build(self):
        torch.manual_seed(0)
        return self.kind(self.config).train()

    def batch(self):
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 64, (4, 12), generator=generator)
        if self.kind is ViTForImageClassification:
            return {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator), "labels": ids[:, 0] % 4}
        if self.kind is WhisperForConditionalGeneration:
            return {"input_features": torch.randn(4, 8, 16, generator=generator), "labels": ids}
        return {"input_ids": ids, "labels": ids}


_BERT_HEAD = ("cls.predictions.transform.dense", "cls.predictions.decoder")
MEMBERS = {
    "llama": Member(LlamaForCausalLM, LlamaConfig(**SIZES), gated=True),
    "qwen3": Member(Qwen3ForCausalLM, Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16), gated=True),
    "mistral": Member(MistralForCausalLM, MistralConfig(**SIZES, num_key_value_heads=2), gated=True),
    "gpt2": Member(GPT2LMHeadModel, GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)),
    "opt": Member(
        OPTForCausalLM,
        OPTConfig(
            vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=16, word_embed_proj_dim=16,
        ),
    ),
    "bert": Member(BertForMaskedLM, BertConfig(**SIZES), _BERT_HEAD),
    "roberta": Member(RobertaForMaskedLM, RobertaConfig(**SIZES), ("lm_head.dense", "lm_head.decoder")),
    "deberta": Member(
        DebertaV2ForMaskedLM,
        DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        _BERT_HEAD,
    ),
    "t5": Member(T5ForConditionalGeneration, T5),
    "vit": Member(ViTForImageClassification, VIT, ("classifier",)),
    "whisper": Member(WhisperForConditionalGeneration, WHISPER, ("proj_out",)),
    "mixtral": Member(
        MixtralForCausalLM,
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
        ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"),
    ),
}  # fmt: skip
