"""MODEL of an account: an architecture by name, Hugging Face's config, the header of a checkpoint, or a function."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.accounting.subject import Batch, Subject
from halfstep.errors import ModelError, unknown
from halfstep.inspection import open_checkpoint
from halfstep.inspection.readers.sharded import read_json
from halfstep.registry import load_function


USUAL = 2048
"""Tokens in an example, where a model takes as many and nothing else is given."""

IMAGE = 224
"""Height and width of images, where a config does not say."""

_MOST = {
    "layer": 2000, "depth": 2000, "block": 2000, "network": 2000, "stage": 2000, "expert": 10_000, "codebook": 10_000,
    "label": 1_000_000,
}  # fmt: skip
"""By the last word of a config's key: how many parts of a kind are built. The deepest model known has 1,000 layers."""

_PARTS = 200_000  # experts of all layers, eight times as many as the largest published model has

_WITH_LABELS = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")


@cache
def architectures() -> Mapping[str, Any]:
    """The architectures that have a name, from architectures.toml."""
    return tomllib.loads(files("halfstep.accounting").joinpath("architectures.toml").read_text(encoding="utf-8"))


def load_subject(name: str) -> Subject:
    """What `name` stands for: an architecture of `architectures()`; a JSON file of Hugging Face's, as config.json,
    or a folder that holds one; a checkpoint, of which the header is read; `module:function` or `file.py:function`.

    A function takes no argument and returns a module, or a tuple of one and its inputs. It is called where tensors have
    no memory, so it must not load weights.

    Raises:
        ModelError: nothing has that name; transformers is not installed, and a config needs it; or a config is none, or
            has more layers than can be built.
        CheckpointError: the checkpoint, or a config's JSON, is broken.
    """
    if name in architectures():
        return named(name)
    path = Path(name).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if config.is_file() and config.suffix == ".json" and not config.name.endswith(".index.json"):
        return _configured(config)
    if path.exists():
        return _stored(path)
    if ":" in name:
        return _function(name)
    raise ModelError(
        unknown("architecture", name, architectures())
        + ". Or give a config.json, a folder that holds one, a safetensors file, or module:function"
    )


# ---- Hugging Face's -------------------------------------------------------------------------------------------------


def _transformers(name: str) -> Any:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ModelError(
            f"{name}: transformers builds it, which is not installed: pip install 'halfstep[hf]'; or give "
            "module:function that builds the model"
        ) from error


def named(name: str, **changes: Any) -> Subject:
    """An architecture of `architectures()`, but for what `changes` says of its config: `named("gpt2", n_layer=2)`.

    Raises:
        ModelError: transformers is not installed.
    """
    row, transformers = architectures()[name], _transformers(name)
    config = transformers.AutoConfig.for_model(row["type"], **row["config"] | changes)
    return _built(name, getattr(transformers, row["class"]), config, (f"{name}: {row['source']}",))


def _configured(file: Path) -> Subject:
    _check_config(file, read_json(file))
    transformers = _transformers(str(file))
    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        why = " ".join(str(error).split())
        raise ModelError(f"{file} cannot be read as a config ({type(error).__name__}: {why})") from error
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise ModelError(
            f"{file} names the architecture {names or 'nothing'}, which transformers "
            f"{transformers.__version__} does not have; give module:function that builds the model"
        )
    return _built(str(file.parent if file.name == "config.json" else file), kind, config)


def _check_config(file: Path, data: Mapping[str, Any]) -> None:
    """Refuse, before anything is made of it, what is no config, and one of which no model could be built in minutes."""
    if "model_type" not in data:
        raise ModelError(
            f"{file} is JSON without a model_type, and so no config of Hugging Face's; give that of a model, a "
            "safetensors file, or module:function that builds the model"
        )
    found: dict[str, int] = {}
    for key, value in _numbers(data):
        kind = next((kind for kind in _MOST if key.rpartition("_")[2].removesuffix("s") == kind), None)
        if kind is not None and value > _MOST[kind]:
            raise ModelError(
                f"{file}: {key} is {value:,}; expected at most {_MOST[kind]:,}, for each of them is built to be counted"
            )
        found[kind or ""] = max(value, found.get(kind or "", 1))
    layers, experts = (found.get(kind, 1) for kind in ("layer", "expert"))
    if layers * experts > _PARTS:
        raise ModelError(
            f"{file}: {layers:,} layers of {experts:,} experts; expected at most {_PARTS:,} of them in all"
        )


def _numbers(data: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The whole numbers of a config, of its parts' configs and of lists, each with its key."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        yield from ((key, one) for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))


def _built(name: str, kind: Any, config: Any, remarks: tuple[str, ...] = ()) -> Subject:
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if getattr(kind, "main_input_name", "") == "pixel_values":
        image = getattr(config, "image_size", IMAGE)
        shape = (getattr(config, "num_channels", 3), *(image if isinstance(image, (list, tuple)) else (image, image)))
        return Subject(
            name,
            lambda: _new(kind, config),
            lambda m, b, s: Batch(named=(("pixel_values", torch.zeros(b, *shape, dtype=torch.float32, device="cpu")),)),
            remarks=remarks,
        )
    labels = kind.__name__.endswith(_WITH_LABELS) and "labels" in inspect.signature(kind.forward).parameters
    more = ("labels",) if labels else ("decoder_input_ids",) if config.is_encoder_decoder else ()

    def batch(model: nn.Module, examples: int, length: int) -> Batch:
        tokens = torch.zeros(examples, length, dtype=torch.int64, device="cpu")
        return Batch(named=tuple(dict.fromkeys(("input_ids", *more), tokens).items()))

    return Subject(name, lambda: _new(kind, config), batch, min(longest or USUAL, USUAL), longest, remarks)


def _new(kind: Any, config: Any) -> nn.Module:
    config.use_cache = False  # a training run keeps none
    model: nn.Module = kind(config)
    return model.train()


# ---- a checkpoint's header ------------------------------------------------------------------------------------------


def _stored(path: Path) -> Subject:
    checkpoint = open_checkpoint(path)
    shapes = {t.storage: t.shape for t in checkpoint.tensors if "float" in t.dtype}
    others = len(checkpoint.tensors) - sum("float" in t.dtype for t in checkpoint.tensors)
    if not shapes:
        raise ModelError(f"{path} holds no floating-point tensor to train; give a checkpoint of a model's weights")

    def build() -> nn.Module:
        model = nn.Module()
        model.tensors = nn.ParameterList(
            nn.Parameter(torch.empty(shape, dtype=torch.float32, device="cpu")) for shape in shapes.values()
        )
        return model

    remarks = [
        "a checkpoint has no forward pass: what activations take is unknown, and no layer is known to be rounded"
    ]
    if others:
        remarks.append(f"{others} tensors that are no floating-point numbers are left out")
    return Subject(str(path), build, remarks=tuple(remarks), has_layers=False)


# ---- a function -----------------------------------------------------------------------------------------------------


def _function(name: str) -> Subject:
    function = load_function(name, ModelError)
    given: list[Any] = []

    def build() -> nn.Module:
        made = function()
        model, *inputs = made if isinstance(made, tuple) and made else (made,)
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"{name}: the function returned {type(model).__name__}; expected a torch.nn.Module, or a tuple of one "
                "and its inputs"
            )
        given[:] = inputs
        return model.train()

    def batch(model: nn.Module, examples: int, length: int) -> Batch:
        if not given:
            return _tokens(name, model, examples, length)
        inputs = [_resized(x, examples) for x in given] if len(given) > 1 else given
        if isinstance(given[0], Mapping):
            return Batch(named=tuple((key, _resized(x, examples)) for key, x in given[0].items()))
        return Batch(args=tuple(_resized(x, examples) for x in inputs))

    return Subject(name, build, batch, USUAL // 2)


def _tokens(name: str, model: nn.Module, examples: int, length: int) -> Batch:
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise ModelError(
            f"{name}: the model has no embedding of tokens, and what it takes is not known: have the function return "
            "(model, inputs), tensors whose first dimension is the batch"
        )
    return Batch(args=(torch.zeros(examples, length, dtype=torch.int64, device="cpu"),))


def _resized(x: Any, examples: int) -> Any:
    """An input with so many examples: those that were given, again and again."""
    if not (isinstance(x, torch.Tensor) and x.dim() and len(x)):
        return x
    return x.repeat(-(-examples // len(x)), *[1] * (x.dim() - 1))[:examples].clone()
