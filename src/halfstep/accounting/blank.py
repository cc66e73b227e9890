"""Tensors without memory: what runs on them computes no value, and is told an ordinary one where it asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


_aten = torch.ops.aten


class Blank(FakeTensorMode):
    """Within it tensors are made without memory, as torch's FakeTensors; real ones that come in are taken for such.

    Code that asks for a value hears 1 of a number and False of a truth value: a maximum is finite and not 0, nothing is
    subnormal, and no state waits for its first step.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default:
            return _ordinary(args[0])
        return super().__torch_dispatch__(func, types, args, dict(kwargs or {}))


def _ordinary(tensor: Tensor) -> bool | float:
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1
