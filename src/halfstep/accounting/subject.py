"""What an account is of: a model, its batches, and the tensors without memory that both are made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

from halfstep.errors import AccountError, HalfstepError, ModelError


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
        return F.cross_entropy(found[0].flatten(0, -2), tokens.flatten().long())
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
