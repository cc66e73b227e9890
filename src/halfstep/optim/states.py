"""A parameter's saved state, as an optimizer in few bits takes it over."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.optim.masters import Master
from halfstep.recipe import MASTERS, SCALED_MASTER, Scaled


RESIDUAL = "_residual"  # ends the state's name for what rounding a moment left over
_KEPT = {SCALED_MASTER, *(name for name, _ in MASTERS.values())}


@dataclass(frozen=True)
class Storage:
    """How an optimizer keeps what it keeps."""

    moments: torch.dtype
    residuals: tuple[str, ...]
    """Moments kept as the sum of two numbers of that dtype."""
    master: Master
    update_rounding: str
    scaled: Scaled | None = None
    """How the weights are kept that `LowBit` has scales for."""


def foreign(saved: Mapping[str, Any], storage: Storage, master: Master) -> set[str]:
    """What masters of other recipes kept in a saved state."""
    return (_KEPT & saved.keys()) - storage.master.keeps.keys() - master.keeps.keys()


def adopt(
    saved: Mapping[str, Any],
    parameter: Tensor,
    storage: Storage,
    master: Master,
    moments: Container[str],
    number: object,
) -> dict[str, Any]:
    """A parameter's saved state in the storage's dtypes, on the parameter's device, sharing no memory with it.

    A master alone says that no step was taken. torch.optim.SGD counts none: with a momentum there was at least one.

    Raises:
        OptimizerError: it belongs to a parameter of another shape.
    """
    state: dict[str, Any] = {}
    keeps = storage.master.keeps | master.keeps
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            if value is not None:
                state[name] = value
        elif name == "step":
            state[name] = value.detach().to("cpu", torch.float32, copy=True)
        elif value.shape != parameter.shape and value.dim():
            raise OptimizerError(
                f"the state of parameter {number} holds {name} of shape {tuple(value.shape)}, "
                f"expected {tuple(parameter.shape)}: it belongs to another model"
            )
        else:
            dtype = keeps.get(name, storage.moments)
            state[name] = value.detach().to(parameter.device, dtype, copy=True)
            if name in storage.residuals and name + RESIDUAL not in saved:
                state[name + RESIDUAL] = (value.to(parameter.device) - state[name].float()).to(dtype)
    if "step" not in state and any(name in moments for name in state):
        state["step"] = torch.ones((), dtype=torch.float32)
    return state


def decode(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rule's moments in float32, each with its residual added."""
    decoded = {name: value.float() for name, value in moments.items() if not name.endswith(RESIDUAL)}
    return {
        name: value + moments[name + RESIDUAL].float() if name + RESIDUAL in moments else value
        for name, value in decoded.items()
    }
