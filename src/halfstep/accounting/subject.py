"""What an account is of: a model, its batches, and the tensors without memory that both are made of.

The model is an architecture by name, Hugging Face's config, the header of a checkpoint, or what a function makes.
"""

from __future__ import annotations

import inspect
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

from halfstep.errors import AccountError, HalfstepError, ModelError, unknown
from halfstep.inspection import open_checkpoint
from halfstep.inspection.readers.safetensors import read_json
from halfstep.registry import load_function


_aten = torch.ops.aten

_WHOLE = (torch.bool, torch.int32, torch.int64)
_STEPS = 64
_SMALL = 2**20
"""The most elements of a tensor that is real."""


@dataclass(frozen=True)
class Batch:
    """What a model is called with: positional or named tensors."""

    args: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    def call(self, model: nn.Module, **more: Any) -> Any:
        """What the model returns for it."""
        return model(*self.args, **dict(self.named), **more)

    def without(self, name: str) -> Batch:
        """The same but for that one."""
        return Batch(self.args, tuple(pair for pair in self.named if pair[0] != name))

    @property
    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.named))) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Subject:
    """A model to be built again for every account, and what is known of its batches.

    `build` and `batch` are called where tensors have no memory (`Blank`).
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module, int, int], Batch] | None = None
    """The batch of so many examples of so many tokens; None where only parameters are known, and nothing can run."""
    sequence: int | None = None
    """Tokens in an example unless told; None where examples are no sequences of tokens."""
    longest: int | None = None
    """The most tokens that it has positions for."""
    remarks: tuple[str, ...] = ()
    has_layers: bool = True
    """Whether its modules are the model's own; else all that is known are parameters."""


def loss_of(output: Any, batch: Batch) -> Tensor:
    """A scalar for the backward pass: the model's own loss where it returns one; cross-entropy against the tokens
    where it returns a row of logits for each; else the mean of the squares of what it returns."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if len(found) == 1 and not found[0].dim():
        return found[0]
    tokens = batch.tensors[0] if batch.tensors else None
    if tokens is not None and not tokens.is_floating_point() and found and found[0].shape[:-1] == tokens.shape:
        return nn.functional.cross_entropy(found[0].flatten(0, -2), tokens.flatten().long())
    return torch.stack([tensor.square().mean() for tensor in found]).sum()


def sequence_of(subject: Subject, sequence: int | None) -> int:
    """The number of tokens in an example.

    Raises:
        AccountError: the model has positions for fewer.
    """
    length = sequence or subject.sequence or 1
    if subject.longest is not None and length > subject.longest:
        raise AccountError(
            f"--seq {length} given, and {subject.name} has positions for {subject.longest} tokens; give at most that"
        )
    return length


@contextmanager
def blank(subject: Subject) -> Iterator[None]:
    """Tensors without memory while it lasts; what a model says while it is built is not for the reader of an account.

    Raises:
        ModelError: the model asks for values that decide what it does next, or fails.
    """
    try:
        with Blank(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except HalfstepError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"{subject.name} asks for values of tensors ({error}), and an account runs on tensors that have none: "
            "measure the real model with halfstep.memory.measure_step"
        ) from error
    except Exception as error:
        why = " ".join(str(error).split())
        raise ModelError(
            f"{subject.name} cannot be run on tensors without memory ({type(error).__name__}: {why[:300]}); build it "
            "without loading weights, and see that it takes this batch"
        ) from error


class Blank(FakeTensorMode):
    """Within it tensors are made without memory, as torch's FakeTensors; real ones that come in are taken for such.

    Code that asks for a value hears 1 of a number and False of a truth value: a maximum is finite and not 0, nothing is
    subnormal, and no state waits for its first step.

    Positions, tokens and masks are real: small tensors of whole numbers and truth values that come from such alone.
    Code asks them which way to go (is anything masked? are these several sequences?), and goes another way than in
    training where it finds a FakeTensor.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        real = torch.Tag.nondeterministic_seeded not in func.tags and all(map(_is_real, given))
        if func is _aten._local_scalar_dense.default and not real:
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is _aten._pack_padded_sequence.default and _is_real(args[1]):
            return _packed(*args)
        kwargs = dict(kwargs or {})
        try:
            made: Any = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not real:
                raise
            return func(*args, **kwargs)
        if real and all(map(_is_small, tree_leaves(made))):
            return func(*args, **kwargs)
        if func is _aten.mkldnn_rnn_layer.default and made[-1] is not None:
            return (*made[:-1], made[-1].new_empty(_workspace(args)))
        return made


def _packed(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Sequences of known lengths, packed: as many rows as they have, and how many go on at each step."""
    narrow = torch.zeros((*x.shape[:2], 1), dtype=x.dtype, device="cpu")
    rows, sizes = _aten._pack_padded_sequence.default(narrow, lengths, batch_first)
    return x.new_empty((len(rows), *x.shape[2:])), sizes


def _workspace(args: tuple[Any, ...]) -> int:
    """The bytes that oneDNN keeps of an LSTM's layer for its backward pass, which torch takes for none without memory.

    They depend on the processor, and are asked of oneDNN itself: a layer of zeros of the same sizes runs, with 64 steps
    of time at most. Each step beyond them is one more of as many bytes.
    """
    steps = int(args[0].shape[0])

    def kept(length: int) -> int:
        given = [
            x if not isinstance(x, Tensor) else torch.zeros(x.shape, dtype=x.dtype, device="cpu")
            for x in (args[0].new_empty((length, *args[0].shape[1:])), *args[1:])
        ]
        return int(_aten.mkldnn_rnn_layer.default(*given)[-1].numel())

    if steps <= _STEPS:
        return kept(steps)
    most = kept(_STEPS)
    return most + (steps - _STEPS) * (most - kept(_STEPS // 2)) // (_STEPS - _STEPS // 2)


def _is_real(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.dtype in _WHOLE and tensor.device.type == "cpu"


def _is_small(made: Any) -> bool:
    """Whether what an operator made may be real."""
    if not isinstance(made, Tensor):
        return True
    return made.dtype in _WHOLE and made.device.type == "cpu" and made.numel() <= _SMALL


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
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
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
    return kind(config).train()  # type: ignore[no-any-return]


# ---- a checkpoint's header ------------------------------------------------------------------------------------------


def _stored(path: Path) -> Subject:
    tensors = open_checkpoint(path).tensors
    shapes = {t.storage: t.shape for t in tensors if "float" in t.dtype}
    others = sum("float" not in t.dtype for t in tensors)
    if not shapes:
        raise ModelError(f"{path} holds no floating-point tensor to train; give a checkpoint of a model's weights")

    def build() -> nn.Module:
        model = nn.Module()
        model.tensors = nn.ParameterList(
            nn.Parameter(torch.empty(shape, dtype=torch.float32, device="cpu")) for shape in shapes.values()
        )
        return model

    remarks = (
        "a checkpoint has no forward pass: what activations take is unknown, and no layer is known to be rounded",
        *([f"{others} tensors that are no floating-point numbers are left out"] if others else []),
    )
    return Subject(str(path), build, remarks=remarks, has_layers=False)


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
        if isinstance(given[0], Mapping):
            return Batch(named=tuple((key, _resized(x, examples)) for key, x in given[0].items()))
        return Batch(args=tuple(_resized(x, examples) for x in given))

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
    if not (isinstance(x, Tensor) and x.dim() and len(x)):
        return x
    return x.repeat(-(-examples // len(x)), *[1] * (x.dim() - 1))[:examples].clone()
