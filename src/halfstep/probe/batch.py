"""The model to probe, from a folder or a function; copies of it; batches; a loss to differentiate."""

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from halfstep.errors import DataError, HalfstepError, ModelError
from halfstep.ops.subclasses import check_initialized
from halfstep.registry import load_function
from halfstep.tracking.nonfinite import tensors_in


Batch = Any
"""The arguments of a model: a mapping gives them by name, a tuple or list by position, a tensor alone."""
Loss = Callable[[nn.Module, Batch], Tensor]


def call(model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch.

    Raises:
        ModelError: the model raised.
    """
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} raised {type(error).__name__} on a batch of {described(batch)}: {error}. "
            "Give data that it takes"
        ) from error


def loss_of(model: nn.Module, batch: Batch, own: Loss | None) -> tuple[Tensor, str]:
    """The loss on a batch, with its autograd graph, and its description in words.

    `own` if given; else the output's `loss`, or an output that is a scalar; else the sum of the floating-point outputs
    times fixed values r from a standard normal distribution, divided by their rows: the gradient is r / rows, about as
    large as a mean cross-entropy's. (A sum of squares has no gradient behind a final layer norm, which keeps it
    constant.)

    Raises:
        ModelError: the model raised, or nothing that it returns requires a gradient.
    """
    loss: Tensor | None
    if own is not None:
        loss, words = own(model, batch), "the given one"
    else:
        loss, words = loss_of_output(call(model, batch))
    if not (isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1):
        raise ModelError(
            f"{type(model).__name__} returns no loss to differentiate on a batch of {described(batch)}: none of its "
            "outputs requires a gradient. Give a model that returns a differentiable tensor, or a `loss`"
        )
    return loss.reshape(()), words


def loss_of_output(output: Any) -> tuple[Tensor | None, str]:
    """The loss in a model's output, or a stand-in, see `loss_of`; None if nothing requires a gradient."""
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if given is None and isinstance(output, Tensor) and output.dim() == 0:
        given = output
    return (
        (given, "the model's own")
        if isinstance(given, Tensor)
        else (
            _stand_in(output),
            "the outputs times fixed normal noise, summed, over their rows (the model returns no loss)",
        )
    )


def _stand_in(output: Any) -> Tensor | None:
    found = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    return torch.stack([_against_noise(t.float()) for t in found]).sum() if found else None


def _against_noise(output: Tensor) -> Tensor:
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(
        output.device
    )
    return (output * noise).sum() / max(1, output.shape[:-1].numel())


def described(batch: Batch) -> str:
    """The shapes and dtypes of a batch, as text."""
    named = batch.items() if isinstance(batch, Mapping) else (("", t) for t in tensors_in(batch))
    words = [
        f"{name + ' ' if name else ''}{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for name, t in named
        if isinstance(t, Tensor)
    ]
    return ", ".join(words) or type(batch).__name__


def moved(batch: Batch, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
    """The batch on a device, with floating-point tensors in `dtype`."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else batch.dtype)
    if isinstance(batch, Mapping):
        return {name: moved(value, device, dtype) for name, value in batch.items()}
    return type(batch)(moved(value, device, dtype) for value in batch) if isinstance(batch, (tuple, list)) else batch


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, without gradients.

    Raises:
        ModelError: it has no parameters, or cannot be copied; or a forward set on an instance refers to the model
            itself, as the copy's would too.
    """
    name = type(model).__name__
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{name} has no parameters; there is nothing to probe")
    check_initialized(model)
    try:
        own = copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name} cannot be copied ({error}), and a probe runs copies; give a model that can"
        ) from error
    originals = set(map(id, model.modules()))
    for path, module in own.named_modules():
        if _reaches(vars(module).get("forward"), originals):
            raise ModelError(
                f"{name}: {path or 'the model'} has a forward that was set on the instance and refers to the original, "
                "so a copy would compute with the original's weights. Give the model without it: del model.forward, "
                "or accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
            )
    own.zero_grad()
    return own


def _reaches(start: Any, modules: set[int]) -> bool:
    """Whether a callable refers to one of the modules: in closures, wrapped functions, bound and partial arguments."""
    seen, left = set[int](), [start]
    while left and len(seen) < 1000:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            if id(one) in modules:
                return True
            continue
        if isinstance(one, FunctionType):
            left += [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
            left += [*(one.__defaults__ or ()), *vars(one).values()]
        elif isinstance(one, MethodType):
            left += [one.__self__, one.__func__]
        elif isinstance(one, partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, (tuple, list)):
            left += one
        elif callable(one) and hasattr(one, "__dict__") and not isinstance(one, type):
            left += vars(one).values()
    return False


@contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """A context after which torch's random generators are restored."""
    kept, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(kept)
        np.random.set_state(numpys)


_BYTES_PER_TOKEN = 12  # more than tokenizers need for a token of English or code


def is_tensor_file(path: str) -> bool:
    """Whether a path names a file of tensors, not of text."""
    return path.endswith((".safetensors", ".pt"))


def tensor_batches(path: str) -> list[Batch]:
    """The batches in a file: one, by name, in .safetensors; a tensor, a mapping, or a list of batches in .pt.

    Raises:
        DataError: it cannot be read, or contains something else, or nothing.
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


def text_batches(text: Tensor, loaded: "Loaded", batches: int, examples: int, context: int) -> tuple[list[Batch], str]:
    """Batches of tokens from windows spread over a text, and a description of how they were made.

    Args:
        text: its bytes, (length,) uint8.
        batches, examples, context: how many batches, windows in a batch, and tokens in a window (at most as many as the
            model takes).

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
    """A model, and information on its inputs."""

    model: nn.Module
    inputs: tuple[Batch, ...] = ()
    """Batches that the function returned with the model."""
    vocabulary: int = 256
    longest: int | None = None
    """The largest number of tokens that it takes."""
    tokenize: Callable[[str], list[int]] | None = None
    named: Callable[[Tensor], Batch] = lambda tokens: tokens
    """Makes a batch from a tensor of tokens (examples, length)."""


def load_model(name: str) -> Loaded:
    """The model in a Hugging Face folder, or that of `module:function` or `file.py:function`.

    A function takes no argument and returns a module, or a tuple (module, inputs ...): the rest are then the module's
    inputs.

    Raises:
        ModelError: there is no such folder, module, file or function, or it returns no model.
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

    def named(tokens: Tensor) -> Batch:
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
