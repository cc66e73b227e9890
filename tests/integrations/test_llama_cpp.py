"""llama.cpp computes our GGUF files like we do: float32 up to the last bits, low-bit up to its rounding of inputs.

Needs `pip install llama-cpp-python`, which compiles llama.cpp for most of an hour and is in no extra."""

import ctypes

import numpy as np
import pytest
import torch
from made_tokenizers import KINDS, made_tokenizer, texts
from test_export_gguf import gpt2, llama

import halfstep


pytestmark = pytest.mark.slow
cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
TOKENS = torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(1))


def logits_of(path):
    """llama.cpp's logits for TOKENS with one thread, no flash attention, and float32 keys and values."""
    model = cpp.llama_model_load_from_file(str(path).encode(), cpp.llama_model_default_params())
    assert model, "llama.cpp does not load it"
    options = cpp.llama_context_default_params()
    options.n_ctx, options.n_threads, options.type_k, options.type_v, options.flash_attn_type = 32, 1, 0, 0, 0
    context = cpp.llama_init_from_model(model, options)
    batch = cpp.llama_batch_init(len(TOKENS), 0, 1)
    batch.n_tokens = len(TOKENS)
    for i, token in enumerate(TOKENS.tolist()):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    assert cpp.llama_decode(context, batch) == 0
    found = np.ctypeslib.as_array(ctypes.cast(cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float)), (24, 64))
    found = torch.from_numpy(found.copy())
    cpp.llama_batch_free(batch)
    cpp.llama_free(context)
    cpp.llama_model_free(model)
    return found


@pytest.mark.parametrize(("format", "recipe", "bound"), [
    ("gguf-f32", None, 1e-3),  # llama.cpp's GELU for GPT-2 is an fp16 table
    ("gguf-bf16", None, 0.02),  # inputs are rounded to bf16
    ("gguf-q8_0", None, 0.05),  # inputs are rounded to 8 bits, like the weights
    ("gguf-mxfp4", "mxfp4", 0.05),
])  # fmt: skip
@pytest.mark.parametrize("make", [llama, gpt2])
def test_logits_equal_those_of_the_exported_weights(make, format, recipe, bound, tmp_path):
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # spreads the logits
                parameter.mul_(3.0).copy_(parameter.bfloat16() if format == "gguf-bf16" else parameter)
    halfstep.export(model, tmp_path / "model.gguf", recipe=recipe, format=format)
    if recipe is not None:
        halfstep.quantize_model(model, recipe)
        halfstep.dequantize_model(model)
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0]
    found = logits_of(tmp_path / "model.gguf")
    assert float((found - expected).norm() / expected.norm()) < bound
    first, second = expected.topk(2).values.unbind(-1)
    clear = first - second > 2 * (found - expected).abs().amax(-1)
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
    assert clear.sum() > 12


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("scaling", [{"rope_type": "linear"}, {"rope_type": "llama3", **LLAMA3}])
def test_scaled_rotary_logits_equal_ours(scaling, tmp_path):
    parameters = {"rope_theta": 10000.0, "factor": 4.0, **scaling}
    model, plain = llama(rope_parameters=parameters).eval(), llama().eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
        expected, other = model(TOKENS[None]).logits[0], plain(TOKENS[None]).logits[0]
    halfstep.export(model, tmp_path / "model.gguf", "gguf-f32")
    assert float((logits_of(tmp_path / "model.gguf") - expected).norm() / expected.norm()) < 1e-5
    assert float((other - expected).norm() / expected.norm()) > 0.01


def tokens_of(vocabulary, text, special):
    """llama.cpp's tokens of a text, with begin and end tokens, and special tokens recognised if `special`."""
    data, room = text.encode(), 2 * len(text.encode()) + 8
    found = (cpp.llama_token * room)()
    count = cpp.llama_tokenize(vocabulary, data, len(data), found, room, True, special)
    assert count >= 0
    return list(found[:count])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_transformers(kind, tmp_path):
    made = made_tokenizer(kind, tmp_path / "folder")
    halfstep.export(llama(vocab_size=1000), tmp_path / "m.gguf", "gguf-f32", tokenizer=tmp_path / "folder")
    options = cpp.llama_model_default_params()
    options.vocab_only = True
    model = cpp.llama_model_load_from_file(str(tmp_path / "m.gguf").encode(), options)
    vocabulary = cpp.llama_model_get_vocab(model)
    strange = ["", "a", "two\n\n\nlines\t", "é ü 日本語 🚀🚀 \u200d", "I'LL don't 1234567 3.14", "\r\n \r\n"]
    for text in (*texts(), *strange):
        assert tokens_of(vocabulary, text, False) == made(text)["input_ids"]
    for text in (" ", "  two"):  # SentencePiece prefixes any text with a space, transformers only text without one
        assert (tokens_of(vocabulary, text, False) == made(text)["input_ids"]) == (kind != "llama")
    named = f"one{made.eos_token}<mine>"
    assert tokens_of(vocabulary, named, True) == made(named)["input_ids"]
    cpp.llama_model_free(model)
