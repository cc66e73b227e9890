"""Write a model as a GGUF file for llama.cpp: Llama and GPT-2, with their tokenizers.

Tokenizers are GPT-2's and Llama 3's byte-level BPE, and Llama's BPE with byte fallback.

Source: llama.cpp, convert_hf_to_gguf.py (names, transposes, the order of rows that its rotary positions expect) and
gguf-py (types of blocks, merges, special tokens, the chat template); conversion/base.py (tokens and their types),
src/llama-vocab.cpp (what it does with each kind).
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from halfstep.errors import CheckpointError, LayoutError, MissingLibraryError, ModelError
from halfstep.inspection.write import refuse_existing
from halfstep.layouts import get_layout
from halfstep.nn.adopt import Applied, applied_to, stock_class
from halfstep.nn.pretrained import KEY, stored_weights, without_codes
from halfstep.nn.quantized_weights import matrices_of
from halfstep.nn.unit.scale import is_unit_scaled
from halfstep.ops import Quantized
from halfstep.ops.part import part_of
from halfstep.quant.cast import pack, unpack
from halfstep.recipe import to_data


with MissingLibraryError.of("export"):
    import gguf


_TYPES = {
    "gguf-f32": ("F32", "ALL_F32"),
    "gguf-bf16": ("BF16", "MOSTLY_BF16"),
    "gguf-q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "gguf-mxfp4": ("MXFP4", "MOSTLY_MXFP4_MOE"),
}
"""GGUF's type of matrices and of the file, by the name of the format."""
_BLOCK = 32
_SCALED = ("linear", "llama3")
"""The types of rotary positions whose frequencies are the default ones, each divided by a factor."""


@dataclass(frozen=True)
class _Architecture:
    """The metadata that llama.cpp needs for a kind of model."""

    id: gguf.MODEL_ARCH
    describe: Callable[[Any], dict[str, Any]]
    """The values of a config, by the names of the writer's methods."""
    refusal: Callable[[Any], str | None]
    """Why llama.cpp's model of this kind differs from a config; None if it does not."""
    transposed: tuple[str, ...] = ()
    """The layers whose parameter has shape (in, out)."""
    rotated: tuple[tuple[str, str], ...] = ()
    """The layers whose rows are ordered for rotary positions, with the config's name for their number of heads."""

    factors: Callable[[Any], dict[str, Tensor]] = lambda model: {}
    """Tensors that llama.cpp needs but the model's state dict lacks."""

    def rows(self, name: str, config: Any, count: int) -> Tensor | None:
        """llama.cpp's order of a tensor's rows (halves of a head become pairs); None if it is the same."""
        heads = next((getattr(config, key) for layer, key in self.rotated if f".{layer}." in name), None)
        return (
            None
            if heads is None
            else torch.arange(count, dtype=torch.int64, device="cpu").view(heads, 2, -1).transpose(1, 2).reshape(-1)
        )


def write_gguf(
    model: nn.Module, path: Path, format: str, version: str, tokenizer: Path | None
) -> tuple[str, str, tuple[str, ...], dict[str, str]]:
    """Write a quantised or a stock model to a new file, with the tokenizer of a folder.

    Returns:
        The recipe's name, empty for a stock model; the tokenizer's kind, empty if there is none; the layers written as
        codes; and those that are codes in the model but values in the file, with the reason.

    Raises:
        ModelError: a model that is neither a Llama nor a GPT-2, or one with options that llama.cpp's lacks.
        LayoutError: the format is MXFP4 and the recipe's weights are not; as `write_tokenizer`.
        CheckpointError: `path` exists, or it cannot be written.
    """
    refuse_existing(path)
    kind = _architecture(model)
    config: Any = model.config
    found = part_of(model).applied
    quantized = isinstance(found, Applied) and found.quantized
    entries = stored_weights(model) if quantized else []
    plain, made = without_codes(model, entries), dict[str, Quantized]()
    for layer, module, entry in entries:
        (made[f"{layer}.{entry.weight.name}"],) = matrices_of(module, entry)
    codes, kept = _codes(made, format)
    block_type, file_type = _TYPES[format]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[kind.id])
    for key, value in {**kind.describe(config), "vocab_size": config.vocab_size}.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_file_type(getattr(gguf.LlamaFileType, file_type))
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    kind_of_tokenizer = "" if tokenizer is None else write_tokenizer(writer, tokenizer, config.vocab_size)
    writer.add_quantized_by(f"halfstep {version}")
    recipe = applied_to(model).recipe if quantized else None
    said = {"halfstep": version, "layout": format, "recipe": None if recipe is None else to_data(recipe)}
    writer.add_string(KEY, json.dumps(said))
    names = gguf.get_tensor_name_map(kind.id, config.num_hidden_layers)
    for name in (*plain, *made):
        target = names.get_name(name, (".weight", ".bias"))
        if target is None:
            raise ModelError(f"{name} has no name in GGUF's {gguf.MODEL_ARCH_NAMES[kind.id]}; export another format")
        if name in codes:
            data, type = _blocks(codes[name], kind.rows(name, config, len(codes[name]["weight_scale"]))), block_type
        else:
            turned = name in plain and any(name.endswith(f".{layer}.weight") for layer in kind.transposed)
            values = made[name].dequantize(torch.float32) if name in made else plain[name].float()
            values = values.t() if turned else values
            rows = kind.rows(name, config, len(values))
            data, type = _stored(values if rows is None else values[rows], block_type)
        writer.add_tensor(target, data, raw_dtype=getattr(gguf.GGMLQuantizationType, type))
    for name, values in kind.factors(model).items():
        writer.add_tensor(name, values.numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.link(partial, path)  # unlike a rename, a link does not replace an existing file
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return recipe.name if recipe else "", kind_of_tokenizer, tuple(name.removesuffix(".weight") for name in codes), kept


def _codes(made: dict[str, Quantized], format: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """The tensors written as codes, in the MXFP4 layout; and the layers that are not, with the reason."""
    if format != "gguf-mxfp4":
        return {}, {}
    layout, codes, kept = get_layout("mxfp4"), {}, {}
    for name, quantized in made.items():
        if (why := layout.refusal(quantized.quantizer)) is not None:
            raise LayoutError(
                f"{name} is {quantized.quantizer.format.name} ({quantized.quantizer.scales}), which gguf-mxfp4 "
                f"cannot hold: {why}. gguf-f32 holds its values"
            )
        if (why := layout.misfit(quantized.shape)) is not None:
            kept[name.removesuffix(".weight")] = why
        else:
            codes[name] = layout.tensors(quantized)
    if not codes:
        raise LayoutError(
            "gguf-mxfp4 holds MXFP4 codes, but no weight of this model is rounded to them: give a recipe that does "
            "(recipe='mxfp4'), or another format (gguf-q8_0, gguf-bf16)"
        )
    return codes, kept


def _blocks(tensors: dict[str, Tensor], rows: Tensor | None) -> NDArray[Any]:
    """GGUF's blocks of 17 bytes: the exponent, and 32 codes, with code j and code j + 16 in one byte."""
    scale, packed = tensors["weight_scale"], tensors["weight_packed"]
    if rows is not None:
        scale, packed = scale[rows], packed[rows]
    codes = unpack(packed, 4, 2 * packed.shape[1]).view(-1, 2, _BLOCK // 2)
    halves = pack(codes.transpose(1, 2).reshape(-1, _BLOCK), 4)
    return torch.cat([scale.reshape(-1, 1), halves], dim=1).view(len(packed), -1).numpy()


def _stored(values: Tensor, type: str) -> tuple[NDArray[Any], str]:
    """Vectors in float32, matrices in the file's type. Matrices that do not consist of whole blocks, and those without
    codes in an MXFP4 file, are written in bf16."""
    array = np.ascontiguousarray(values.numpy(), dtype=np.float32)
    if values.dim() < 2 or type == "F32":
        return array, "F32"
    narrow = type if type == "Q8_0" and values.shape[1] % _BLOCK == 0 else "BF16"
    return gguf.quants.quantize(array, getattr(gguf.GGMLQuantizationType, narrow)), narrow


def _architecture(model: nn.Module) -> _Architecture:
    kind = _ARCHITECTURES.get(stock_class(model).__name__)
    if kind is None or is_unit_scaled(model):
        found = "a unit-scaled model" if is_unit_scaled(model) else stock_class(model).__name__
        raise ModelError(
            f"{found} cannot be written as GGUF here; expected one of {', '.join(_ARCHITECTURES)}. Other models: "
            "export a folder, dequantise it with transformers, and convert that with llama.cpp's own script"
        )
    if (why := kind.refusal(model.config)) is not None:
        raise ModelError(f"{stock_class(model).__name__} with {why} is another model in llama.cpp; export a folder")
    return kind


def _describe_llama(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        **dict.fromkeys(
            ("key_length", "value_length", "rope_dimension_count"),
            config.head_dim or config.hidden_size // config.num_attention_heads,
        ),
        "rope_freq_base": float((config.rope_parameters or {}).get("rope_theta", 10000.0)),
        "layer_norm_rms_eps": config.rms_norm_eps,
    }


def _rotary_factors(model: Any) -> dict[str, Tensor]:
    """llama.cpp's divisors of the frequencies of rotary positions: the default frequencies over the scaled ones."""
    rope = model.config.rope_parameters or {}
    if rope.get("rope_type") not in _SCALED:
        return {}
    with torch.device("cpu"):
        made: Any = stock_class(model.model.rotary_emb)(model.config)  # the model's own may have been cast
    scaled = made.inv_freq.double()
    steps = torch.arange(len(scaled), dtype=torch.float64, device="cpu") / len(scaled)
    name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]
    return {f"{name}.weight": (rope["rope_theta"] ** -steps / scaled).float()}


def _refuse_llama(config: Any) -> str | None:
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ("default", *_SCALED):
        return f"rotary positions of type {rope!r}"
    return None if config.hidden_act == "silu" else f"the activation function {config.hidden_act!r}"


def _describe_gpt2(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.n_layer,
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "head_count": config.n_head,
        "layer_norm_eps": config.layer_norm_epsilon,
    }


def _refuse_gpt2(config: Any) -> str | None:
    if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
        return f"the activation function {config.activation_function!r}"
    options = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention")
    found = next((name for name in options if getattr(config, name, False)), None)
    return found or (None if config.scale_attn_weights else "scale_attn_weights = False")


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(
        gguf.MODEL_ARCH.LLAMA,
        _describe_llama,
        _refuse_llama,
        rotated=(("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")),
        factors=_rotary_factors,
    ),
    "GPT2LMHeadModel": _Architecture(
        gguf.MODEL_ARCH.GPT2, _describe_gpt2, _refuse_gpt2, transposed=("c_attn", "c_proj", "c_fc")
    ),
}
"""The supported models, by transformers' class."""


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""The regular expression by which Llama 3's tokenizer splits text."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_CUTS = {
    "gpt-2": ([_BYTES | {"use_regex": True}], False),
    "llama-bpe": (
        [
            {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False},
            _BYTES | {"use_regex": False},
        ],
        True,
    ),
}
"""By llama.cpp's name: how text is split before bytes are merged, and whether words that are tokens skip merging."""
_OUT = "leave the tokenizer out (--no-tokenizer), and the file takes and gives token numbers"
_SPACE = "\u2581"


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> str:
    """Write tokens, merges or scores, special tokens and the chat template; return llama.cpp's name of the kind.

    Args:
        size: the model's number of tokens; unused tokens are added if the tokenizer has fewer.

    Raises:
        LayoutError: the folder has no tokenizer, one that llama.cpp would not reproduce, or one with more tokens than
            the model.
    """
    tokenizer = _read(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    said = {"model": {}} if backend is None else json.loads(backend.to_str())
    kind, named, vocabulary = _kind(said, folder), tokenizer.added_tokens_decoder, tokenizer.get_vocab()
    tokens, is_llama = {number: token for token, number in vocabulary.items()}, kind == "llama"
    if (count := max(tokens) + 1) > size:
        raise LayoutError(f"{folder}: a tokenizer of {count} tokens for a model of {size}; give the model's own")
    scores = _scores(said["model"]["merges"], vocabulary, named, folder) if is_llama else {}
    start, end = _ends(tokenizer, folder)
    writer.add_tokenizer_model("llama" if is_llama else "gpt2")
    writer.add_tokenizer_pre("default" if is_llama else kind)
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(size)])
    unknown = tokenizer.unk_token if is_llama else None
    writer.add_token_types([_type(tokens.get(n), named.get(n), unknown, is_llama) for n in range(size)])
    if is_llama:
        writer.add_token_scores([scores.get(number, 0.0) for number in range(size)])
        writer.add_add_space_prefix(bool(_prefixed(said)))
    special = gguf.SpecialVocab(folder, load_merges=not is_llama, n_vocab=size)
    special.add_special_token |= {"bos": start, "eos": end}
    special.add_to_gguf(writer, quiet=True)
    return kind


def _read(folder: Path) -> Any:
    load = import_module("transformers").AutoTokenizer.from_pretrained
    try:
        return load(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise LayoutError(
            f"{folder}: no tokenizer can be read ({type(error).__name__}: {why}). Name its folder, or {_OUT}"
        ) from error


def _kind(said: dict[str, Any], folder: Path) -> str:
    """`llama`, or the name of a byte-level BPE's way to split text."""
    model, cuts = said["model"], said.get("pre_tokenizer") or {}
    changed = any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    parts, kept = cuts.get("pretokenizers", [cuts]), bool(model.get("ignore_merges"))
    if model.get("type") == "BPE" and not changed:
        if model.get("byte_fallback") and not kept and _prefixed(said) is not None:
            return "llama"
        plain = not model.get("byte_fallback") and not said.get("normalizer")
        for kind, (own, wanted) in _CUTS.items():
            if plain and kept == wanted and _are(parts, own):
                return kind
    found = ", ".join(part.get("type", "nothing") for part in parts)
    raise LayoutError(
        f"{folder}: a tokenizer of type {model.get('type', 'unknown')} that splits text by {found}; expected "
        "GPT-2's or Llama 3's byte-level BPE, or Llama's with byte_fallback, which llama.cpp follows. To "
        f"export without, {_OUT}"
    )


def _are(parts: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(parts) == len(expected) and all(
        part.get(key) == value for part, own in zip(parts, expected, strict=True) for key, value in own.items()
    )


def _prefixed(said: dict[str, Any]) -> bool | None:
    """Whether the tokenizer prepends a space to a text, if its spaces are parts of tokens; None for another
    tokenizer."""
    normal, cuts = said.get("normalizer"), said.get("pre_tokenizer")
    if normal is None and cuts and _are([cuts], [{"type": "Metaspace", "replacement": _SPACE, "split": False}]):
        return bool(cuts["prepend_scheme"] != "never")
    steps = (normal or {}).get("normalizers", [normal or {}])
    if cuts is None and _are(steps[-1:], [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]):
        before = steps[:-1]
        return bool(before) if not before or _are(before, [{"type": "Prepend", "prepend": _SPACE}]) else None
    return None


def _scores(
    merges: list[list[str]], vocabulary: dict[str, int], named: dict[int, Any], folder: Path
) -> dict[int, float]:
    """Scores for llama.cpp, which merges any two neighbours that form a token, highest score first: these give the
    order of the merges."""
    pairs = {tuple(pair) for pair in merges}
    order = [token for token, _ in groupby("".join(pair) for pair in merges)]
    plain = (token for token, number in vocabulary.items() if number not in named and not _is_byte(token))
    cuts = ((token[:i], token[i:]) for token in plain for i in range(1, len(token)))
    lost = next((pair for pair in cuts if pair not in pairs and {*pair} <= vocabulary.keys()), None)
    if lost is not None or len({*order}) < len(order):
        why = "merges of a token are apart" if lost is None else f"no merge joins {lost[0]!r} and {lost[1]!r}"
        raise LayoutError(
            f"{folder}: {why}, and llama.cpp joins any two neighbours that are a token, by scores of tokens: it would "
            f"tokenize otherwise. To export without, {_OUT}"
        )
    return {vocabulary[token]: -float(rank) for rank, token in enumerate(order)}


def _is_byte(token: str) -> bool:
    return re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def _type(token: str | None, named: Any, unknown: str | None, is_llama: bool) -> int:
    """GGUF's type of a token; of None (no such token) UNUSED. `named` is the token's entry among the added tokens, or
    None."""
    if token is None:
        return gguf.TokenType.UNUSED
    if token == unknown:
        return gguf.TokenType.UNKNOWN
    if named is not None:
        return gguf.TokenType.CONTROL if named.special else gguf.TokenType.USER_DEFINED
    return gguf.TokenType.BYTE if is_llama and _is_byte(token) else gguf.TokenType.NORMAL


def _ends(tokenizer: Any, folder: Path) -> tuple[bool, bool]:
    """Whether the tokenizer adds a begin token and an end token to a text."""
    inner, whole = (tokenizer("a", add_special_tokens=given)["input_ids"] for given in (False, True))
    for start, end in ((False, False), (True, False), (False, True), (True, True)):
        if [tokenizer.bos_token_id] * start + inner + [tokenizer.eos_token_id] * end == whole:
            return start, end
    raise LayoutError(
        f"{folder}: a text gets other tokens than one at its beginning and one at its end: {whole} of {inner}. "
        f"To export without, {_OUT}"
    )
