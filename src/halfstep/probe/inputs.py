"""The model to probe, and batches to probe it with: of text, as tokens, or of tensors in a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from halfstep.errors import DataError, HalfstepError, ModelError
from halfstep.probe.batch import Batch
from halfstep.registry import load_function


_BYTES_PER_TOKEN = 12  # more than tokenizers need for a token of English or code


def is_tensor_file(path: str) -> bool:
    """Whether a path names a file of tensors rather than text."""
    return path.endswith((".safetensors", ".pt"))


def tensor_batches(path: str) -> list[Batch]:
    """The batches in a file: one, by name, in .safetensors; a tensor, a mapping, or a list of batches in .pt.

    Raises:
        DataError: it cannot be read, or holds something else, or nothing.
    """
    try:
        held = load_file(path) if path.endswith(".safetensors") else torch.load(path, weights_only=True)
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        raise DataError(
            f"{path}: cannot be read as tensors ({error}); expected .safetensors, or .pt of tensors"
        ) from error
    batches = list(held) if isinstance(held, list) else [held]
    if not batches or not all(map(_is_batch, batches)):
        raise DataError(
            f"{path}: holds {'nothing' if not batches else type(held).__name__}; expected tensors by the names of the "
            "model's arguments, a tensor, or a list of such batches"
        )
    return batches


def _is_batch(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(item, Tensor) for item in value.values())
    return isinstance(value, Tensor) or (
        isinstance(value, tuple) and bool(value) and all(isinstance(item, Tensor) for item in value)
    )


def text_batches(text: Tensor, loaded: Loaded, batches: int, examples: int, context: int) -> tuple[list[Batch], str]:
    """Batches of tokens from windows spread over a text, and how they were made, in words.

    Args:
        text: its bytes, (length,) uint8.
        batches, examples, context: how many batches, windows in a batch, and tokens in a window (cut to what the model
            takes).

    Raises:
        DataError: the text is shorter than one window.
    """
    context = min(context, loaded.longest or context)
    size = context * (1 if loaded.tokenize is None else _BYTES_PER_TOKEN)
    if len(text) < size:
        raise DataError(
            f"the text has {len(text)} bytes, and one window takes {size}; give more, or a smaller --context"
        )
    count = batches * examples
    starts = torch.arange(count, dtype=torch.int64, device="cpu") * (len(text) - size) // max(1, count - 1)
    windows = text[starts[:, None] + torch.arange(size, dtype=torch.int64, device="cpu")]
    if loaded.tokenize is None:
        tokens = windows.long() % loaded.vocabulary
        how = "as bytes" if loaded.vocabulary >= 256 else f"as bytes modulo the vocabulary of {loaded.vocabulary}"
        how += ": no tokenizer came with the model"
    else:
        tokens, how = _tokens(windows, loaded.tokenize, context), "by the model's tokenizer"
    return [loaded.named(piece) for piece in torch.split(tokens, examples)], how


def _tokens(windows: Tensor, tokenize: Callable[[str], list[int]], context: int) -> Tensor:
    rows = [tokenize(bytes(window.tolist()).decode("utf-8", errors="replace"))[:context] for window in windows]
    length = min(map(len, rows))
    if length == 0:
        raise DataError("the tokenizer makes no tokens of the text; give other text")
    return torch.tensor([row[:length] for row in rows], dtype=torch.int64, device="cpu")


_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_WITH_LABELS = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")


@dataclass(frozen=True)
class Loaded:
    """A model, and what is known of its inputs."""

    model: nn.Module
    inputs: tuple[Batch, ...] = ()
    """Batches that came with it."""
    vocabulary: int = 256
    longest: int | None = None
    """The most tokens it takes."""
    tokenize: Callable[[str], list[int]] | None = None
    named: Callable[[torch.Tensor], Batch] = lambda tokens: tokens
    """The batch of a tensor of tokens, (examples, length)."""


def load_model(name: str) -> Loaded:
    """The model in a Hugging Face folder, or that of `module:function` or `file.py:function`.

    A function takes no argument and returns a module, or a tuple (module, inputs ...): then the rest is what the module
    is called with.

    Raises:
        ModelError: there is no such folder, module, file or function, or it gives no model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _hugging_face(folder)
    if ":" not in name:
        raise ModelError(
            f"{name!r} is not a folder; expected a local Hugging Face folder (download a hub model first), or "
            "module:function or file.py:function that returns a torch.nn.Module"
        )
    return _from_function(name)


def _from_function(name: str) -> Loaded:
    function = load_function(name, ModelError)
    try:
        made = function()
    except HalfstepError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: the function raised {type(error).__name__}: {error}") from error
    model, *inputs = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{name}: the function returned {type(model).__name__}; expected a torch.nn.Module, or a tuple of one and "
            "its inputs"
        )
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    batches = () if not inputs else (inputs[0],) if len(inputs) == 1 else (tuple(inputs),)
    return Loaded(model, batches, tables[0] if tables else 256)


def _hugging_face(folder: Path) -> Loaded:
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ModelError(
            f"{folder}: a Hugging Face folder needs transformers, which is not installed; pip install 'halfstep[hf]'"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json; expected a Hugging Face folder, as save_pretrained writes")
    model, config = _pretrained(transformers, folder)
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids":
        return Loaded(model, named=lambda tokens: _refuse(model, main))
    text = config.get_text_config()
    tokenize = None
    if any((folder / file).is_file() for file in _TOKENIZERS):
        tokenizer = _quiet(folder, transformers.AutoTokenizer.from_pretrained, folder, local_files_only=True)
        tokenize = lambda words: tokenizer(words, add_special_tokens=False)["input_ids"]  # noqa: E731
    labels = type(model).__name__.endswith(_WITH_LABELS) and "labels" in inspect.signature(model.forward).parameters
    more = ("labels",) if labels else ("decoder_input_ids",) if config.is_encoder_decoder else ()

    def named(tokens: torch.Tensor) -> Batch:
        return dict.fromkeys(("input_ids", *more), tokens)

    return Loaded(model, (), text.vocab_size, getattr(text, "max_position_embeddings", None), tokenize, named)


def _pretrained(transformers: Any, folder: Path) -> tuple[nn.Module, Any]:
    config = _quiet(folder, transformers.AutoConfig.from_pretrained, folder, local_files_only=True)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise ModelError(
            f"{folder}: config.json names the architecture {names or 'nothing'}, which transformers "
            f"{transformers.__version__} does not have; give module:function that builds the model"
        )
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        model, told = _quiet(
            folder, kind.from_pretrained, folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    finally:
        if shown:
            bars.enable_progress_bar()
    missing = sorted(told["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the model's weights ({missing[0]} ...), which would be random; "
            "download it again, or correct config.json's architectures"
        )
    return model, config


def _quiet(folder: Path, load: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return load(*args, **options)
    except Exception as error:
        why = " ".join(str(error).split())  # transformers and torch write several lines
        raise ModelError(f"{folder}: cannot be loaded ({type(error).__name__}: {why})") from error


def _refuse(model: nn.Module, main: str) -> Batch:
    raise ModelError(
        f"{type(model).__name__} takes {main}, not text; give its inputs as tensors: --data inputs.safetensors, with "
        "the names of its arguments"
    )
