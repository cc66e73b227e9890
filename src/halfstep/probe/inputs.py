"""Batches to probe with: of text, as tokens, or of tensors in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from halfstep.errors import DataError
from halfstep.probe.batch import Batch
from halfstep.probe.load import Loaded


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
