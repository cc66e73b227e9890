"""Tensors without memory: what runs on them computes no value, and is told an ordinary one where it asks."""

from __future__ import annotations

from collections.abc import Mapping
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
        given = [x if not isinstance(x, Tensor) else _zeros(x) for x in (first, *args[1:])]
        return int(_aten.mkldnn_rnn_layer.default(*given)[-1].numel())

    if steps <= _STEPS:
        return kept(steps)
    most = kept(_STEPS)
    return most + (steps - _STEPS) * (most - kept(_STEPS // 2)) // (_STEPS - _STEPS // 2)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device="cpu")


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
