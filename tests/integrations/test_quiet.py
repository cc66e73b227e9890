"""Healthy models train in transformers' Trainer without a warning from halfstep."""

import pytest
import torch
from trainers import SIZES, arguments
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from halfstep.integrations.transformers import HalfstepTrainer


RECIPES = "bf16-mixed fp16-mixed bf16-stochastic bf16-master fp8-delayed fp8-current mxfp4 fp8lm-o2"
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**TOKENS, **SIZES}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
BART = {f"{side}_{part}": size for side in ("encoder", "decoder") for part, size in
        {"layers": 2, "attention_heads": 2, "ffn_dim": 64}.items()}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
BERT = {**TEXT, "embedding_size": 32, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
CAUSAL, MASKED, IMAGES = AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForImageClassification
FAMILIES = [
    ("llama mistral qwen2 qwen3 gemma gemma2 phi phi3 stablelm starcoder2 olmo olmo2 cohere granite gpt_neox persimmon",
     CAUSAL, GROUPED),
    ("falcon bloom mamba", CAUSAL, TEXT),
    ("gpt2", CAUSAL, {**TEXT, "n_inner": 64}),
    ("gptj", CAUSAL, {**TEXT, "n_inner": 64, "rotary_dim": 8}),
    ("gpt_neo", CAUSAL, {**TEXT, "attention_types": [[["global", "local"], 1]]}),
    ("opt", CAUSAL, {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    ("mpt", CAUSAL, {**TOKENS, "d_model": 32, "n_heads": 2, "n_layers": 2}),
    ("mixtral qwen2_moe qwen3_moe", CAUSAL, {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 32}),
    ("bert roberta electra albert distilbert mpnet deberta-v2 roformer fnet convbert", MASKED, BERT),
    ("bart pegasus m2m_100", AutoModelForSeq2SeqLM, {**TOKENS, **BART, "d_model": 32, "decoder_start_token_id": 1}),
    ("t5 mt5", AutoModelForSeq2SeqLM, {**T5, "pad_token_id": 0, "decoder_start_token_id": 0}),
    ("vit beit dinov2", IMAGES, {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 4}),
    ("swin", IMAGES, {**SWIN, "num_labels": 4}),
]  # fmt: skip
MODELS = {kind: (auto, options) for kinds, auto, options in FAMILIES for kind in kinds.split()}


def examples(images):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (8, 8), generator=generator)
    if images:
        return [{"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": int(row[0]) % 4} for row in ids]
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES.split())
@pytest.mark.parametrize("kind", MODELS)
def test_healthy_model_gives_no_warning(kind, recipe, tmp_path):
    """Warnings are errors. Steps skipped because the initial loss scale is too high are logged, not warned of."""
    auto, options = MODELS[kind]
    model = auto.from_config(AutoConfig.for_model(kind, **options))
    args = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=1)
    data = examples(images=auto is IMAGES)
    HalfstepTrainer(model, args, train_dataset=data, recipe=recipe, generator=3, audit=False).train()
