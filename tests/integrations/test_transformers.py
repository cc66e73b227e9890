"""Hugging Face models under every recipe train, stay tied, and save what stock models save."""

import itertools
import json

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import halfstep
from families import in_turn, slow_unless
from halfstep.recipe import DTYPES, get_recipe
from tiny import BREAKS, FAST, RECIPES, assert_same, descend


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)),
    "llama": (LlamaForCausalLM, LlamaConfig(vocab_size=64, tie_word_embeddings=True, **SIZES)),
    "bert": (BertForMaskedLM, BertConfig(vocab_size=64, max_position_embeddings=16, **SIZES)),
    "t5": (T5ForConditionalGeneration, T5),
}
every_model = pytest.mark.parametrize("kind", MODELS)
ALIKE = {"fp16-lists", "bf16-kahan", "fp8-current", "fp8-block"}
"""Recipes applied to a model like fp16-mixed, bf16-stochastic, fp8-delayed and mxfp8, respectively."""
FEW = [
    name
    for name in RECIPES
    if name in FAST - {"fp8-amax", "fp8lm-o3", "bf16-split", "bf16-collage-plus", "fp4-wang"} - ALIKE
]
BY_DEPTH = {name for name in RECIPES if any(rule.blocks for rule in get_recipe(name).rules)}
PAIRS = [(kind, name) for kind, name in itertools.product(MODELS, RECIPES) if kind != "t5" or name not in BY_DEPTH]
every_pair = pytest.mark.parametrize(
    ("kind", "name"), slow_unless(in_turn([*MODELS], FEW).__contains__, PAIRS)
)  # a T5 has two stacks of blocks, so a rule by depth is ambiguous (tests/nn/test_blocks.py)
TIED = {
    "gpt2": ("lm_head", "transformer.wte"),
    "llama": ("lm_head", "model.embed_tokens"),
    "bert": ("cls.predictions.decoder", "bert.embeddings.word_embeddings"),
    "t5": ("lm_head", "shared"),
}


def build(kind):
    torch.manual_seed(0)
    model_class, config = MODELS[kind]
    return model_class(config).train()


def batch():
    ids = torch.randint(2, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def test_remedy_for_rounded_rotary_frequencies_works():
    stock, model = build("llama"), build("llama").bfloat16()
    with (
        pytest.warns(UserWarning, match="parameters arrive in 16 bits"),
        pytest.warns(UserWarning, match="2 of 2 buff"),
    ):
        halfstep.apply(model, "bf16-mixed")
    assert {name.rpartition(".")[2] for one in halfstep.audit(model).warnings for name in one.tensors} == {
        "inv_freq",
        "original_inv_freq",
    }
    for m in model.modules():
        if hasattr(m, "inv_freq"):
            m.inv_freq, m.original_inv_freq = type(m)(m.config).inv_freq, type(m)(m.config).inv_freq
    assert halfstep.audit(model).warnings == ()
    assert_same(dict(model.named_buffers()), dict(stock.named_buffers()))


@every_model
def test_audit_of_a_new_model_has_no_warnings(kind):
    model = build(kind)
    assert halfstep.audit(model, torch.optim.AdamW(model.parameters())).warnings == ()


def prepared(kind, name):
    model = build(kind)
    return halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3), recipe=name, generator=3)


def train(model, optimizer, scaler, steps):
    return descend(lambda: model(**batch()).loss, optimizer, scaler, steps)


@pytest.mark.quick("t5-bf16-stochastic", "llama-bf16-mixed", "gpt2-fp8-delayed")
@every_pair
def test_trains_and_stays_tied(kind, name):
    stock = build(kind)
    model, optimizer, scaler = prepared(kind, name)
    assert list(model.state_dict()) == list(stock.state_dict())
    losses = train(model, optimizer, scaler, 3 if name in BREAKS else 15)
    if name not in BREAKS:
        assert torch.tensor(losses).isfinite().all()
        assert min(losses[-3:]) < losses[0] - 0.2
    head, embedding = (model.get_submodule(path).weight for path in TIED[kind])
    assert head is embedding
    assert head.data_ptr() == embedding.data_ptr()
    assert head.dtype == DTYPES[get_recipe(name).weights]


@every_pair
def test_outputs_are_float32(kind, name):
    model, _, _ = prepared(kind, name)
    output = model(**batch(), output_hidden_states=True)
    floating = [output.loss, output.logits, *(output.get("hidden_states") or output.decoder_hidden_states)]
    assert {tensor.dtype for tensor in floating} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def saved(model, folder):
    from safetensors import safe_open

    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        return config, sorted(file.keys())


@every_pair
def test_save_pretrained_writes_the_stock_models_config_and_names(kind, name, tmp_path):
    (stock_config, stock_names), (config, names) = (
        saved(model, tmp_path / str(i)) for i, model in enumerate((build(kind), prepared(kind, name)[0]))
    )
    for written in (stock_config, config):
        written.pop("dtype", None)
    assert config == stock_config
    assert names == stock_names
    assert config["architectures"] == [MODELS[kind][0].__name__]


@pytest.mark.quick("llama", "bert")
@every_model
def test_saved_model_loads_as_a_stock_model(kind, tmp_path):
    model, optimizer, scaler = prepared(kind, "bf16-mixed")
    train(model, optimizer, scaler, 2)
    model.save_pretrained(tmp_path)
    loaded = MODELS[kind][0].from_pretrained(tmp_path)
    assert type(loaded) is MODELS[kind][0]
    halfstep.revert(model)
    assert type(model) is MODELS[kind][0]
    with torch.no_grad():
        assert_same(loaded.eval()(**batch()).logits, model.eval()(**batch()).logits)


@every_model
def test_fp32_recipe_equals_the_stock_model(kind):
    stock, (model, _, _) = build(kind), prepared(kind, "fp32")
    losses = []
    for each in (stock, model):
        torch.manual_seed(5)  # dropout
        loss = each(**batch()).loss
        loss.backward()
        losses.append(loss.detach())
    assert_same(losses[1], losses[0])
    assert_same([p.grad for p in model.parameters()], [p.grad for p in stock.parameters()])


def test_generation_works_under_a_recipe():
    model, _, _ = prepared("gpt2", "bf16-master")
    model.eval()
    ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert ids.shape == (1, 7)
