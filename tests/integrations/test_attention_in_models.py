"""transformers' models with attn_implementation="halfstep": equals sdpa, and rounds the matmuls under a recipe."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import halfstep
from halfstep import formats, get_recipe
from halfstep.errors import ModelError, RecipeError
from halfstep.integrations.attention import attention, register_attention
from halfstep.nn import DotProductAttention
from halfstep.ops.part import own_part
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul, linear_spec


register_attention()
E4, E5 = (Quantizer(formats.get(f), scales=Scales(TENSOR, get_scaling("current"))) for f in ("e4m3fn", "e5m2"))
PROBABILITIES = Quantizer(formats.get("e4m3fn"), scales=Scales(TENSOR, get_scaling("fixed", bias=8)))
"""For softmax probabilities, whose largest value is known: 1 becomes 256."""
SCORES = linear_spec(input=E4, weight=E4, grad_output=E5)
MIX = LinearSpec(Matmul(PROBABILITIES, E4), Matmul(E5, E4), Matmul(E5, PROBABILITIES))
RECIPE = replace(get_recipe("bf16-mixed"), name="fp8-attention", attention=AttentionSpec(scores=SCORES, mix=MIX))
IDS = torch.arange(24).view(2, 12) % 32
SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def llama(implementation="halfstep"):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation)


def rounded(x, quantizer):
    return quantizer.quantize(x.detach().contiguous().view(-1, x.shape[-1])).dequantize().view(x.shape).double()


def test_attention_without_a_recipe_equals_sdpa():
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    for given in (None, mask):
        found, expected = (m(input_ids=IDS, attention_mask=given).logits for m in (llama(), llama("sdpa")))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # grouped queries take another path


def test_both_matmuls_and_their_gradients_use_rounded_operands():
    """Against float64 on the quantized q, k, v, probabilities and gradients."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, heads, 12, 16).requires_grad_() for heads in (4, 2, 2))
    module, dy = nn.Module(), torch.randn(2, 12, 4, 16)
    own_part(module).attention = RECIPE.attention
    y, _ = attention(module, q, k, v, None, scaling=0.25, is_causal=True)
    y.backward(dy)
    keys, values = (t.detach().repeat_interleave(2, 1) for t in (k, v))
    below = torch.ones(12, 12, dtype=torch.bool).tril()
    scores = rounded(q, E4) @ rounded(keys, E4).mT * 0.25
    weights = torch.softmax(scores.float().masked_fill(~below, -torch.inf), -1)
    expected = rounded(weights, PROBABILITIES) @ rounded(values.mT, E4).mT
    torch.testing.assert_close(y.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-6)
    d = dy.transpose(1, 2)
    of_weights = rounded(d, E5) @ rounded(values, E4).mT
    of_values = rounded(weights.mT, PROBABILITIES) @ rounded(d.mT, E5).mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * 0.25
    of_queries = rounded(of_scores.float(), E5) @ rounded(keys.mT, E4).mT
    torch.testing.assert_close(v.grad.double(), of_values.view(2, 2, 2, 12, 16).sum(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q.grad.double(), of_queries, rtol=1e-2, atol=1e-3)  # ties of E5M2 may round either way


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_recipe_applies_to_every_attention_and_trains():
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, RECIPE)
    assert halfstep.plan_of(model).attention == tuple(f"model.layers.{n}.self_attn" for n in range(2))
    model.gradient_checkpointing_enable()
    losses = []
    for _ in range(8):
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        ours = model.eval()(IDS).logits
        halfstep.revert(model)
        stock = model(IDS).logits
    assert 0 < (ours - stock).norm() < 0.2 * stock.norm()


def test_attention_equals_dot_product_attention_module():
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 12, 16) for _ in range(3))
    module, other = nn.Module(), DotProductAttention()
    for one in (module, other):
        own_part(one).attention = RECIPE.attention
    found, _ = attention(module, q, k, v, None, is_causal=True)
    assert torch.equal(found, other(q, k, v, is_causal=True).transpose(1, 2))


def test_unsupported_attention_raises():
    sizes = {**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    capped = Gemma2ForCausalLM._from_config(Gemma2Config(**sizes), attn_implementation="halfstep")
    with pytest.raises(ModelError, match=r"Gemma2Attention passes softcap to its attention.*take 'eager' or 'sdpa'"):
        capped(IDS)
    with pytest.raises(
        RecipeError, match=re.escape("attn_implementation='halfstep' (halfstep.integrations.attention)")
    ):
        halfstep.apply(llama("sdpa"), RECIPE)


def test_bidirectional_model_equals_sdpa():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2)
    model = BertModel(config, add_pooling_layer=False).eval()
    expected = model(IDS).last_hidden_state
    model.set_attn_implementation("halfstep")
    torch.testing.assert_close(model(IDS).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    halfstep.apply(model, RECIPE)
    assert halfstep.plan_of(model).attention == ("encoder.layer.0.attention.self",)
