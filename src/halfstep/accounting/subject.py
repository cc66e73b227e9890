"""The model to account for and its batches, and `Blank`, the FakeTensor mode in which both are built.

The model is a named architecture, a Hugging Face config, the header of a checkpoint, or a function's result.
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
"""The most elements of a real tensor under `Blank`."""


@dataclass(frozen=True)
class Batch:
    """The arguments of a model's forward: positional and keyword ones."""

    args: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    def call(self, model: nn.Module, **more: Any) -> Any:
        """Call the model with the batch and return its output."""
        return model(*self.args, **dict(self.named), **more)

    def without(self, name: str) -> Batch:
        """The batch without the keyword argument `name`."""
        return Batch(self.args, tuple(pair for pair in self.named if pair[0] != name))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.named))) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Subject:
    """How to build a model, once for each account, and its batches.

    `build` and `batch` are called under `Blank`.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module, int, int], Batch] | None = None
    """(model, examples, tokens) -> Batch; None if only parameters are known and the model cannot run."""
    sequence: int | None = None
    """The default number of tokens in an example; None if examples are not sequences."""
    longest: int | None = None
    """The most tokens for which the model has positions; None: unlimited or unknown."""
    remarks: tuple[str, ...] = ()
    has_layers: bool = True
    """Whether `build` returns the real modules; if not, only parameters."""


def loss_of(output: Any, batch: Batch) -> Tensor:
    """A scalar loss for the backward pass: the model's own if it returns one; cross-entropy against the input tokens if
    the output has a row of logits for each token; else the sum over the outputs of their mean squares."""
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
    """The number of tokens in an example: `sequence`, or else the subject's default.

    Raises:
        AccountError: more tokens than the model has positions for.
    """
    length = sequence or subject.sequence or 1
    if subject.longest is not None and length > subject.longest:
        raise AccountError(
            f"--seq {length} given, and {subject.name} has positions for {subject.longest} tokens; give at most that"
        )
    return length


@contextmanager
def blank(subject: Subject) -> Iterator[None]:
    """A context under `Blank` with warnings suppressed, which turns a model's failures into ModelError.

    Raises:
        ModelError: the model's control flow depends on tensor values, or the model fails.
    """
    try:
        with Blank(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except HalfstepError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"{subject.name} reads values of tensors ({error}), but an account runs on FakeTensors, which have none: "
            "measure the real model with halfstep.memory.measure_step"
        ) from error
    except Exception as error:
        why = " ".join(str(error).split())
        raise ModelError(
            f"{subject.name} cannot be run on FakeTensors ({type(error).__name__}: {why[:300]}); build it without "
            "loading weights, and check that it takes this batch"
        ) from error


class Blank(FakeTensorMode):
    """A FakeTensorMode for accounts: tensors are made as FakeTensors, and real inputs are treated as fake ones.

    `.item()` of a FakeTensor returns 1, or False for bool: an amax is then finite and not 0, nothing is subnormal, and
    no state waits for its first step.

    Small int32, int64 and bool tensors on the CPU that are computed only from such tensors stay real: they are
    positions, tokens and masks. Models branch on their values (is anything masked? are there several sequences?), and
    would take another branch than in training if these were FakeTensors.
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
    """The result of `_pack_padded_sequence` with real `lengths`: a fake tensor of the packed rows, and the real batch
    sizes at each step."""
    narrow = torch.zeros((*x.shape[:2], 1), dtype=x.dtype, device="cpu")
    rows, sizes = _aten._pack_padded_sequence.default(narrow, lengths, batch_first)
    return x.new_empty((len(rows), *x.shape[2:])), sizes


def _workspace(args: tuple[Any, ...]) -> int:
    """The bytes of the workspace that oneDNN's LSTM layer saves for backward; torch's fake kernel reports none.

    They depend on the CPU, so a real layer of zeros of the same sizes runs, with at most 64 time steps. For longer
    sequences the size is extrapolated linearly from 32 and 64 steps.
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
    """Whether an operator's output may be real: small, integer or bool, and on the CPU. True if it is not a tensor."""
    if not isinstance(made, Tensor):
        return True
    return made.dtype in _WHOLE and made.device.type == "cpu" and made.numel() <= _SMALL


USUAL = 2048
"""The default number of tokens in an example, if the model has positions for as many."""

IMAGE = 224
"""The default height and width of images, if a config has none."""

_MOST = {
    "layer": 2000, "depth": 2000, "block": 2000, "network": 2000, "stage": 2000, "expert": 10_000, "codebook": 10_000,
    "label": 1_000_000,
}  # fmt: skip
"""The largest accepted value of a config's key by its last word: the deepest known model has 1,000 layers."""

_PARTS = 200_000  # the most experts in all layers together, eight times those of the largest published model

_WITH_LABELS = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")


@cache
def architectures() -> Mapping[str, Any]:
    """The named architectures of architectures.toml."""
    return tomllib.loads(files("halfstep.accounting").joinpath("architectures.toml").read_text(encoding="utf-8"))


def load_subject(name: str) -> Subject:
    """The Subject of a name: an architecture of `architectures()`; a Hugging Face config (JSON), or a folder with a
    config.json; a checkpoint, of which only the header is read; `module:function` or `file.py:function`.

    A function takes no argument and returns a module, or a tuple of a module and its inputs. It is called under
    `Blank`, so it must not load weights.

    Raises:
        ModelError: nothing has that name; a config needs transformers, which is not installed; a JSON file is not a
            config, or has more layers than can be built.
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
            f"{name} needs transformers, which is not installed: pip install 'halfstep[hf]'; or give module:function "
            "that builds the model"
        ) from error


def named(name: str, **changes: Any) -> Subject:
    """The Subject of an architecture of `architectures()` with changes to its config: `named("gpt2", n_layer=2)`.

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
    """Check that JSON is a Hugging Face config, and of a model small enough to be built module by module in minutes."""
    if "model_type" not in data:
        raise ModelError(
            f"{file} is JSON without a model_type, and so not a Hugging Face config; give a model's config.json, a "
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
    """The integers of a config, including those in nested configs and in lists, as (key, integer)."""
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
            f"{name}: the model has no token embedding, so its inputs are unknown: have the function return "
            "(model, inputs), tensors whose first dimension is the batch"
        )
    return Batch(args=(torch.zeros(examples, length, dtype=torch.int64, device="cpu"),))


def _resized(x: Any, examples: int) -> Any:
    """A model input with `examples` examples: its own ones repeated."""
    if not (isinstance(x, Tensor) and x.dim() and len(x)):
        return x
    return x.repeat(-(-examples // len(x)), *[1] * (x.dim() - 1))[:examples].clone()
