"""Write a model as a GGUF file, which llama.cpp loads: Llama and GPT-2.

Source: llama.cpp, convert_hf_to_gguf.py (names, transposes, the order of rows that its rotary positions expect) and
gguf-py (types of blocks).
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from halfstep.errors import CheckpointError, LayoutError, MissingLibraryError, ModelError
from halfstep.inspection.write import refuse_existing
from halfstep.layouts import get_layout
from halfstep.nn.adopt import stock_class
from halfstep.nn.applied import Applied, applied_to
from halfstep.nn.pretrained import KEY, stored_weights, without_codes
from halfstep.nn.quantized_weights import matrices_of
from halfstep.nn.unit.scale import is_unit_scaled
from halfstep.ops import Quantized
from halfstep.ops.part import part_of
from halfstep.quant.pack import pack, unpack
from halfstep.recipe import to_data
from halfstep.serving.gguf_tokenizer import write_tokenizer


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
    """What llama.cpp has to know of a kind of model."""

    id: gguf.MODEL_ARCH
    describe: Callable[[Any], dict[str, Any]]
    """The numbers of a config, as the writer calls them."""
    refusal: Callable[[Any], str | None]
    """Why llama.cpp's model of this kind is another than that of a config; None where it is the same."""
    transposed: tuple[str, ...] = ()
    """The layers whose parameter is (in, out)."""
    rotated: tuple[tuple[str, str], ...] = ()
    """The layers whose rows lie in the order of rotary positions, and what the config calls their number of heads."""

    factors: Callable[[Any], dict[str, Tensor]] = lambda model: {}
    """Tensors that llama.cpp has of a model, and the model's state dict has not."""

    def rows(self, name: str, config: Any, count: int) -> Tensor | None:
        """In which order llama.cpp has the rows of a tensor; None where they stay: halves of a head become pairs."""
        heads = next((getattr(config, key) for layer, key in self.rotated if f".{layer}." in name), None)
        return (
            None
            if heads is None
            else torch.arange(count, dtype=torch.int64, device="cpu").view(heads, 2, -1).transpose(1, 2).reshape(-1)
        )


def write_gguf(
    model: nn.Module, path: Path, format: str, version: str, tokenizer: Path | None
) -> tuple[str, str, tuple[str, ...], dict[str, str]]:
    """Write a quantised or a stock model to a new file, and the tokenizer of a folder.

    Returns:
        The recipe's name, empty for a stock model; the tokenizer's kind, empty where there is none; the layers whose
        codes are the file's; and those that the model has in codes and the file as their values, with the reason.

    Raises:
        ModelError: a kind of model that is neither Llama's nor GPT-2's, or one with options that llama.cpp's has not.
        LayoutError: the format is MXFP4 and the recipe's weights are not; as `write_tokenizer`.
        CheckpointError: there is something at `path`, or it cannot be written.
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
        os.link(partial, path)  # unlike a rename this replaces nothing
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    done = recipe.name if recipe else ""
    return done, kind_of_tokenizer, tuple(name.removesuffix(".weight") for name in codes), kept


def _codes(made: dict[str, Quantized], format: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """What is written as codes, as the MXFP4 layout has it; and the layers that are not, with the reason."""
    if format != "gguf-mxfp4":
        return {}, {}
    layout, codes, kept = get_layout("mxfp4"), {}, {}
    for name, quantized in made.items():
        if (why := layout.refusal(quantized.quantizer)) is not None:
            raise LayoutError(
                f"{name} is {quantized.quantizer.format.name} ({quantized.quantizer.scales}), which gguf-mxfp4 does "
                f"not hold: {why}. gguf-f32 holds its values as they are"
            )
        if (why := layout.misfit(quantized.shape)) is not None:
            kept[name.removesuffix(".weight")] = why
        else:
            codes[name] = layout.tensors(quantized)
    if not codes:
        raise LayoutError(
            "gguf-mxfp4 holds codes of MXFP4, and no weight of this model is in such: give a recipe that rounds to "
            "them (recipe='mxfp4'), or another format (gguf-q8_0, gguf-bf16)"
        )
    return codes, kept


def _blocks(tensors: dict[str, Tensor], rows: Tensor | None) -> NDArray[Any]:
    """GGUF's blocks of 17 bytes: the exponent, and 32 codes, number j beside number j + 16."""
    scale, packed = tensors["weight_scale"], tensors["weight_packed"]
    if rows is not None:
        scale, packed = scale[rows], packed[rows]
    codes = unpack(packed, 4, 2 * packed.shape[1]).view(-1, 2, _BLOCK // 2)
    halves = pack(codes.transpose(1, 2).reshape(-1, _BLOCK), 4)
    blocks = torch.cat([scale.reshape(-1, 1), halves], dim=1)
    return blocks.view(len(packed), -1).numpy()


def _stored(values: Tensor, type: str) -> tuple[NDArray[Any], str]:
    """Vectors in float32, matrices in the file's type; those that are not made of whole blocks, and those that an
    MXFP4 file has no codes of, in bf16."""
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
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), size),
        "rope_freq_base": float((config.rope_parameters or {}).get("rope_theta", 10000.0)),
        "layer_norm_rms_eps": config.rms_norm_eps,
    }


def _rotary_factors(model: Any) -> dict[str, Tensor]:
    """What llama.cpp divides the frequencies of rotary positions by: the default ones over the scaled ones."""
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
"""The kinds of models, by transformers' class."""
