"""Load the model to probe: a Hugging Face folder, or what a function of a module or file returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.errors import HalfstepError, ModelError
from halfstep.probe.batch import Batch
from halfstep.registry import load_function


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
