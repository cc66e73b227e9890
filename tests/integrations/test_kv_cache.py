"""LowBitCache against a cache of rounded values, formulas, and unsupported configurations."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers.cache_utils import DynamicCache

from halfstep.errors import ModelError, QuantizationError
from halfstep.integrations.kv_cache import KINDS, LowBitCache
from halfstep.quant import get_quantizer
from tiny import assert_same


CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, head_dim=40, pad_token_id=0,
)  # fmt: skip
BITS = {"int8": 8 + 32 / 40, "e4m3fn": 8 + 32 / 40, "mxfp8": 8 + 16 / 40, "int4": 4 + 32 / 40, "mxfp4": 4 + 16 / 40}
"""Bits per element of heads of 40 elements, with a float32 scale or two of bf16 or E8M0."""


class Rounded(DynamicCache):
    """A cache that rounds keys and values on arrival; LowBitCache must decode to the same."""

    def __init__(self, config, kind):
        super().__init__(config=config)
        self.kind = kind

    def update(self, keys, values, *args, **kwargs):
        return super().update(*(KINDS[self.kind](x.contiguous()) for x in (keys, values)), *args, **kwargs)


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.mark.quick("e4m3fn", "int4")
@pytest.mark.parametrize("kind", KINDS)
def test_generation_equals_that_from_rounded_keys_and_values(kind):
    llama, prompt = model(), torch.randint(1, 64, (2, 9))
    coded, rounded = LowBitCache(CONFIG, kind), Rounded(CONFIG, kind)
    how = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found, expected, stock = (
        llama.generate(prompt, past_key_values=cache, **how) for cache in (coded, rounded, DynamicCache(config=CONFIG))
    )
    assert_same(list(found.logits), list(expected.logits))
    assert not torch.equal(found.logits[-1], stock.logits[-1])
    numbers = sum(x.numel() for layer in rounded.layers for x in (layer.keys, layer.values))
    assert coded.nbytes * 8 == pytest.approx(numbers * BITS[kind])


def test_int8_has_a_scale_per_token_and_head():
    x = torch.randn(2, 3, 5, 16) * torch.logspace(-3, 3, 5)[:, None]
    keys, values = LowBitCache(CONFIG, "int8").update(x, -x, 0)
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    expected = (x.double() / scale).round() * scale
    torch.testing.assert_close(keys, expected.float(), rtol=1e-6, atol=0)
    assert torch.equal(keys, -values)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_codes_do_not_depend_on_how_the_prompt_is_split(kind):
    once, by_token = LowBitCache(CONFIG, kind), LowBitCache(CONFIG, kind)
    x = torch.randn(2, 2, 7, 40).to(torch.bfloat16)
    keys, _ = once.update(x, x, 0)
    for token in x.split(1, 2):
        last, _ = by_token.update(token, token, 0)
    assert keys.dtype == torch.bfloat16
    assert torch.equal(keys, last)
    assert torch.equal(once.layers[0].keys, by_token.layers[0].keys)
    assert once.get_seq_length() == 7


def test_reordering_and_cropping_apply_to_codes():
    coded, rounded = LowBitCache(CONFIG, "int4"), Rounded(CONFIG, "int4")
    x = torch.randn(3, 2, 6, 40)
    for cache in (coded, rounded):
        cache.update(x, x.flip(0), 0)
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        cache.crop(-2)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3, 5]))
    token = torch.randn(3, 2, 1, 40)
    assert_same(list(coded.update(token, token, 0)), list(rounded.update(token, token, 0)))
    coded.reset()
    assert (coded.get_seq_length(), coded.nbytes) == (0, 0)


def test_beam_search_equals_that_from_rounded_keys_and_values():
    llama, prompt = model(), torch.randint(1, 64, (2, 5))
    caches = LowBitCache(CONFIG, "mxfp8"), Rounded(CONFIG, "mxfp8")
    found, expected = (llama.generate(prompt, past_key_values=c, num_beams=3, max_new_tokens=5) for c in caches)
    assert torch.equal(found, expected)


def test_keys_and_values_may_have_different_formats():
    x = torch.randn(1, 2, 3, 40)
    keys, values = LowBitCache(CONFIG, "int8", KINDS["int4"]).update(x, x, 0)
    assert (keys - x).norm() * 5 < (values - x).norm()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("int3", "unknown kind of KV cache 'int3'"),
        (get_quantizer("e4m3fn"), r"stored as float8_e4m3fn \(no scales\): each token is rounded separately"),
        (get_quantizer("nvfp4"), "Expected scales per row or part of a row"),
    ],
)
def test_quantizers_that_share_scales_between_tokens_raise(kind, message):
    with pytest.raises(QuantizationError, match=message):
        LowBitCache(CONFIG, kind)


def test_sliding_window_model_raises():
    with pytest.raises(ModelError, match="layer 0 of this MistralConfig has a DynamicSlidingWindowLayer"):
        LowBitCache(MistralConfig(num_hidden_layers=1, sliding_window=8))
