"""The bytes of training by a recipe, by role: the recipe is run on tensors without memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

from halfstep.accounting.checkpointing import checkpointed
from halfstep.accounting.subject import Subject, loss_of
from halfstep.distributed.sharded import shared
from halfstep.errors import AccountError, HalfstepError, ModelError, unknown
from halfstep.memory import StepBytes, measure_persistent, measure_step, measure_update
from halfstep.optim import Lamb, Lion
from halfstep.preparation import prepare
from halfstep.recipe import OPERANDS, Communication, Recipe, get_recipe, get_storage


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lion": Lion,
    "lamb": Lamb,
}
"""Optimizers by name; `sgd` has no momentum, and `momentum` is SGD with one."""


@dataclass(frozen=True)
class Account:
    """The bytes of one recipe on one device that holds everything."""

    recipe: str
    parameters: int
    """How many there are; tied ones count once."""
    trained: int
    """How many of them have a gradient."""
    bytes: StepBytes
    passes: bool
    """Whether a pass was run: where not, activations are unknown, and count nothing."""
    across: Communication | None = None
    """In which formats gradients and sharded weights cross from device to device; None: as they are stored."""

    @property
    def per_parameter(self) -> float:
        """Persistent bytes a parameter."""
        return self.bytes.persistent / self.parameters


def account(
    subject: Subject,
    recipe: str | Recipe,
    *,
    batch: int = 1,
    sequence: int | None = None,
    optimizer: str = "adamw",
    checkpointing: str = "none",
    per_layer: bool = False,
) -> Account:
    """Build the model without memory, have it follow the recipe, run a forward and a backward pass, and count.

    Args:
        recipe: a name, a file, or a `Recipe`: one's own too.
        batch, sequence: examples, and tokens in each (None: the subject's usual number).
        optimizer: a key of `OPTIMIZERS`.
        checkpointing: a key of `checkpointing.CHECKPOINTING`.
        per_layer: the optimizer steps within the backward pass, and each gradient is dropped when it has arrived.

    Of a recipe with stages it is the account of the stage that holds the most at once: what such a run takes.

    Raises:
        AccountError: an unknown optimizer or checkpointing; a longer sequence than the model has positions for; a
            recipe that keeps linear layers otherwise, of a checkpoint.
        RecipeError, ModelError, OptimizerError: as `halfstep.prepare`; a model that cannot be run without values.
    """
    recipe = get_recipe(recipe)
    if optimizer not in OPTIMIZERS:
        raise AccountError(unknown("optimizer", optimizer, OPTIMIZERS))
    length = sequence_of(subject, sequence)
    if recipe.stages:
        options: dict[str, Any] = {"batch": batch, "sequence": sequence, "optimizer": optimizer}
        options |= {"checkpointing": checkpointing, "per_layer": per_layer}
        each = [account(subject, stage, **options) for stage in recipe.by_stage]
        most = max(each, key=lambda account: max(account.bytes.peak, account.bytes.persistent + account.bytes.update))
        return replace(most, recipe=recipe.name)
    if not subject.has_layers:
        recipe = _without_layers(subject, recipe)
    with blank(subject):
        model = subject.build()
        wrapped = checkpointed(model, checkpointing) if subject.batch is not None else model
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        model, low_bit, scaler = prepare(wrapped, OPTIMIZERS[optimizer](trained), recipe, generator=0)
        if subject.batch is None:
            found = measure_persistent(model, low_bit, per_layer)
        else:
            data = subject.batch(model, batch, length)
            found = measure_step(
                model, low_bit, lambda: loss_of(data.call(model), data), data.tensors, scaler.scale, per_layer
            )
        update = measure_update(model, low_bit)
    # Steps within the pass come while activations are there: at most so much on top.
    found = replace(found, update=update, peak=found.peak + (update if per_layer else 0))
    counts = sum(p.numel() for p in parameters), sum(p.numel() for p in trained)
    return Account(recipe.name, *counts, found, subject.batch is not None, crossing(recipe))


def crossing(recipe: Recipe) -> Communication | None:
    """In which formats gradients and weights cross: as the recipe says. Gradients that are kept as codes are not, where
    several devices train."""
    across = recipe.communication
    if across is not None and across.weights == OPERANDS and not any(shared(rule.linear) for rule in recipe.rules):
        across = None if across.gradients is None else replace(across, weights=None)
    if recipe.codes is None or recipe.codes.grads is None or (across is not None and across.gradients is not None):
        return across
    return Communication(get_storage("fp32"), across.weights if across is not None else None)


def _without_layers(subject: Subject, recipe: Recipe) -> Recipe:
    """What a recipe keeps of parameters alone, whose layers are not known: rounded products keep nothing."""
    if recipe.codes is not None or recipe.projection is not None:
        raise AccountError(
            f"{subject.name} does not say which of its matrices are linear layers', and recipe {recipe.name!r} keeps "
            "those otherwise than others; give the model's config.json or its folder, or module:function"
        )
    return replace(recipe, rules=(), attention=None, smooth_glu=None, saved=None)


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


_aten = torch.ops.aten

_WHOLE = (torch.bool, torch.int32, torch.int64)
_STEPS = 64
_SMALL = 2**20
"""The most elements of a tensor that is real."""


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
            return _ordinary(args[0])
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
        first = args[0].new_empty((length, *args[0].shape[1:]))
        given = [
            x if not isinstance(x, Tensor) else torch.zeros(x.shape, dtype=x.dtype, device="cpu")
            for x in (first, *args[1:])
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


def _ordinary(tensor: Tensor) -> bool | float:
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1
