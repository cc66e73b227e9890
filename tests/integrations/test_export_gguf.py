"""GGUF files: gguf's own reader returns our quantizers' values, under llama.cpp's names and in its order."""

import copy
import itertools
import json
import math

import gguf
import pytest
import torch
from made_tokenizers import KINDS, TEMPLATE, made_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import halfstep
from halfstep.errors import CheckpointError, LayoutError, ModelError, RecipeError
from halfstep.nn.pretrained import KEY
from tiny import assert_same


SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **options}))


def gpt2(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **options}))


def read(path):
    """The values of every tensor as gguf's reader decodes them, their types, and the metadata."""
    reader = gguf.GGUFReader(path)
    values = {
        t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()).view(*reversed(t.shape.tolist()))
        for t in reader.tensors
    }
    return values, {t.name: t.tensor_type.name for t in reader.tensors}, reader.fields


def pairs(weight, heads):
    """The rows in llama.cpp's order: for each head, alternating between its first and second half."""
    size = len(weight) // heads
    rows = [h * size + half * size // 2 + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[rows]


def quantized(model, recipe):
    made = copy.deepcopy(model)
    halfstep.quantize_model(made, recipe)
    return made


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "MXFP4"])
def test_llama_file_holds_our_quantizers_values(kind, tmp_path):
    model = llama(attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    done = halfstep.export(model, tmp_path / "m.gguf", f"gguf-{kind.lower()}", recipe="mxfp4")
    ours = quantized(model, "mxfp4")
    values, types, fields = read(tmp_path / "m.gguf")
    for i, layer in enumerate(ours.model.layers):
        own = {
            "attn_q": pairs(layer.self_attn.q_proj.weight, 4),
            "attn_k": pairs(layer.self_attn.k_proj.weight, 2),
            "attn_v": layer.self_attn.v_proj.weight,
            "attn_output": layer.self_attn.o_proj.weight,
            "ffn_gate": layer.mlp.gate_proj.weight,
            "ffn_up": layer.mlp.up_proj.weight,
            "ffn_down": layer.mlp.down_proj.weight,
        }
        for name, weight in own.items():
            found = values[f"blk.{i}.{name}.weight"]
            assert types[f"blk.{i}.{name}.weight"] == kind
            if kind == "Q8_0":
                step = weight.view(len(weight), -1, 32).abs().amax(-1, keepdim=True) / 127
                assert ((found - weight).view(len(weight), -1, 32).abs() <= 0.51 * step + 127 * step * 2**-11).all()
            else:
                assert (found == weight).all()  # E2M1 times a power of two is a bf16 value; -0 is read as 0
        assert_same(values[f"blk.{i}.attn_q.bias"], pairs(model.model.layers[i].self_attn.q_proj.bias.detach(), 4))
        assert_same(values[f"blk.{i}.attn_norm.weight"], layer.input_layernorm.weight.detach())
    assert done.quantized == (tuple(path for path in done.quantized) if kind == "MXFP4" else ())
    assert len(done.quantized) == (14 if kind == "MXFP4" else 0)
    metadata = {name: field.contents() for name, field in fields.items()}
    assert metadata["general.architecture"] == "llama"
    assert (metadata["llama.block_count"], metadata["llama.attention.head_count_kv"]) == (2, 2)
    assert metadata["llama.rope.dimension_count"] == 16
    assert json.loads(metadata[KEY])["recipe"]["name"] == "mxfp4"


def llama_cpp_factor(rope, frequency):
    """The rotary scaling factor of one frequency, as in convert_hf_to_gguf.py."""
    if rope["rope_type"] == "linear":
        return rope["factor"]
    length, old = 2 * math.pi / frequency, rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if length < old / high:
        return 1.0
    if length > old / low:
        return rope["factor"]
    smooth = (old / length - low) / (high - low)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_rotary_scaling_is_written_as_factors(kind, tmp_path):
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_type": kind, "factor": 8.0, "rope_theta": 10000.0, **(bounds if kind == "llama3" else {})}
    halfstep.export(llama(rope_parameters=rope).bfloat16(), tmp_path / "m.gguf", "gguf-bf16")
    values, types, _ = read(tmp_path / "m.gguf")
    expected = [llama_cpp_factor(rope, 10000.0 ** (-i / 8)) for i in range(8)]
    assert len({*expected}) == (4 if kind == "llama3" else 1)
    assert types["rope_freqs.weight"] == "F32"
    torch.testing.assert_close(values["rope_freqs.weight"], torch.tensor(expected))
    halfstep.export(llama(), tmp_path / "default.gguf", "gguf-bf16")
    assert "rope_freqs.weight" not in read(tmp_path / "default.gguf")[0]


def test_gpt2_is_transposed_without_its_tied_head(tmp_path):
    model = gpt2()
    halfstep.export(model, tmp_path / "m.gguf", "gguf-mxfp4", recipe="mxfp4")
    halfstep.export(model, tmp_path / "stock.gguf", "gguf-f32")
    ours = quantized(model, "mxfp4")
    for file, expected in (("m", ours), ("stock", model)):
        values, types, fields = read(tmp_path / f"{file}.gguf")
        for i, block in enumerate(expected.transformer.h):
            own = {"attn_qkv": block.attn.c_attn, "attn_output": block.attn.c_proj}
            own |= {"ffn_up": block.mlp.c_fc, "ffn_down": block.mlp.c_proj}
            for name, layer in own.items():
                assert (values[f"blk.{i}.{name}.weight"] == layer.weight.t()).all()
                assert_same(values[f"blk.{i}.{name}.bias"], layer.bias.detach())
        assert "output.weight" not in values
        assert fields["gpt2.feed_forward_length"].contents() == 256
    assert types["token_embd.weight"] == "F32"
    assert_same(values["token_embd.weight"], model.transformer.wte.weight.detach())


def test_inspect_recognises_the_blocks(tmp_path):
    halfstep.export(llama(), tmp_path / "m.gguf", "gguf-mxfp4", recipe="mxfp4")
    (found,) = halfstep.inspect(tmp_path / "m.gguf").schemes
    assert (found.scheme.upper(), found.layers) == ("GGUF MXFP4", 14)


def test_unsupported_gguf_exports_raise(tmp_path):
    path = tmp_path / "m.gguf"
    qwen = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS))
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM cannot be written as GGUF here; expected one of Llama"):
        halfstep.export(qwen, path, "gguf-bf16")
    for given, match in (
        ({"tokenizer": tmp_path / "none"}, "is not a folder; name one that holds"),
        ({"dtype": "bf16"}, "take gguf-bf16"),
        ({"max_shard_size": "1GB"}, "GGUF is one file"),
    ):
        with pytest.raises((CheckpointError, LayoutError), match=match):
            halfstep.export(llama(), path, "gguf-f32", **given)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match=r"rotary positions of type 'dynamic' is another model in llama.cpp"):
        halfstep.export(llama(rope_parameters=rope), path, "gguf-bf16")
    with pytest.raises(ModelError, match=r"the activation function 'relu' is another model"):
        halfstep.export(gpt2(activation_function="relu"), path, "gguf-bf16")
    with pytest.raises(LayoutError, match=r"which gguf-mxfp4 cannot hold: values of float8_e4m3fn are not all values"):
        halfstep.export(llama(), path, "gguf-mxfp4", recipe="mxfp8")
    with pytest.raises(LayoutError, match=r"no weight of this model is rounded to them: give a recipe"):
        halfstep.export(llama(), path, "gguf-mxfp4")
    with pytest.raises(LayoutError, match=r"unknown format 'gguf-q4_0'; nearest: gguf-q8_0"):
        halfstep.export(llama(), path, "gguf-q4_0")
    with pytest.raises(RecipeError, match=r"rounds no weights"):
        halfstep.export(llama(), path, "gguf-f32", recipe="bf16-mixed")
    assert not list(tmp_path.iterdir())
    path.write_text("mine")
    with pytest.raises(CheckpointError, match=r"exists; name a file that does not"):
        halfstep.export(llama(), path, "gguf-f32")
    assert path.read_text() == "mine"


def test_layers_without_whole_blocks_stay_unquantized(tmp_path):
    done = halfstep.export(llama(intermediate_size=80), tmp_path / "m.gguf", "gguf-mxfp4", recipe="mxfp4")
    assert set(done.kept) == {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    values, types, _ = read(tmp_path / "m.gguf")
    ours = quantized(llama(intermediate_size=80), "mxfp4")
    assert types["blk.1.ffn_down.weight"] == "BF16"
    assert (values["blk.1.ffn_down.weight"] == ours.model.layers[1].mlp.down_proj.weight).all()


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def fields(path):
    """The file's `tokenizer.` fields, without that prefix."""
    found = gguf.GGUFReader(path).fields
    return {name.removeprefix("tokenizer."): f.contents() for name, f in found.items() if name.startswith("tokenizer.")}


@pytest.mark.quick("gpt-2", "llama")
@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_is_written_to_the_file(kind, tmp_path):
    made = made_tokenizer(kind, tmp_path / "folder")
    done = halfstep.export(llama(vocab_size=1000), tmp_path / "m.gguf", "gguf-f32", tokenizer=tmp_path / "folder")
    metadata, vocabulary = fields(tmp_path / "m.gguf"), made.get_vocab()
    assert done.tokenizer == kind
    assert f"tokenizer: {kind}" in str(done)
    assert (metadata["ggml.model"], metadata["ggml.pre"]) == (
        ("llama", "default") if kind == "llama" else ("gpt2", kind)
    )
    assert {token: number for number, token in enumerate(metadata["ggml.tokens"][: len(vocabulary)])} == vocabulary
    assert metadata["ggml.tokens"][len(vocabulary) :] == [f"[PAD{number}]" for number in range(len(vocabulary), 1000)]
    assert metadata["chat_template"] == TEMPLATE
    types = {
        token: gguf.TokenType(value)
        for token, value in zip(metadata["ggml.tokens"], metadata["ggml.token_type"], strict=True)
    }
    assert types["[PAD999]"] == gguf.TokenType.UNUSED
    assert types[made.eos_token] == gguf.TokenType.CONTROL
    assert types["<mine>"] == gguf.TokenType.USER_DEFINED
    assert (metadata["ggml.bos_token_id"], metadata["ggml.eos_token_id"]) == (made.bos_token_id, made.eos_token_id)
    assert metadata["ggml.add_bos_token"] == (made("a")["input_ids"][0] == made.bos_token_id) == (kind != "gpt-2")
    if kind == "llama":
        assert types["<0x41>"] == gguf.TokenType.BYTE
        assert metadata["ggml.add_space_prefix"]
        scores = metadata["ggml.scores"]
        firsts = [vocabulary["".join(pair)] for pair in json.loads(made.backend_tokenizer.to_str())["model"]["merges"]]
        assert all(scores[one] >= scores[two] for one, two in itertools.pairwise(firsts))
    else:
        merges = json.loads(made.backend_tokenizer.to_str())["model"]["merges"]
        assert metadata["ggml.merges"] == [" ".join(pair) for pair in merges]


def test_tokenizers_unsupported_by_llama_cpp_raise(tmp_path):
    def refused(change, words, size=1000, kind="gpt-2"):
        folder = tmp_path / words
        made_tokenizer(kind, folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        change(tokenizer)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "TokenizersBackend"}))
        with pytest.raises(LayoutError, match=words):
            halfstep.export(llama(vocab_size=size), tmp_path / "m.gguf", "gguf-f32", tokenizer=folder)
        assert not (tmp_path / "m.gguf").exists()

    out = "leave the tokenizer out"
    refused(
        lambda tokenizer: tokenizer["pre_tokenizer"].update(add_prefix_space=True),
        rf"type BPE that splits text by ByteLevel.*{out}",
    )
    refused(lambda tokenizer: tokenizer.update(pre_tokenizer={"type": "Whitespace"}), "splits text by Whitespace")
    refused(lambda tokenizer: tokenizer.update(normalizer={"type": "Lowercase"}), "type BPE that splits text by Byte")
    refused(lambda tokenizer: tokenizer["model"].update(ignore_merges=True), "that splits text by ByteLevel")
    refused(lambda tokenizer: None, "a tokenizer of 601 tokens for a model of 64", size=64)
    refused(lambda tokenizer: tokenizer["model"]["merges"].pop(5), f"no merge joins .*{out}", kind="llama")

    def moved(tokenizer):  # moves one of two merges that give the same token to the end
        merges = tokenizer["model"]["merges"]
        first = next(i for i, (one, two) in enumerate(itertools.pairwise(merges)) if "".join(one) == "".join(two))
        merges.append(merges.pop(first))

    refused(moved, "merges of a token are apart", kind="llama")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LayoutError, match="no tokenizer can be read"):
        halfstep.export(llama(), tmp_path / "m.gguf", "gguf-f32", tokenizer=tmp_path / "empty")
