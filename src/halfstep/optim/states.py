"""What an optimizer keeps of a parameter: moments begun as their storage says, and saved states taken over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.ops import codes
from halfstep.optim.shards import is_spread
from halfstep.quant.description import label
from halfstep.quant.masters import Master, get_master
from halfstep.recipe import PROJECTOR, Recipe, Storage, is_master


FORMATS = "state_formats"
"""The option of a parameter group that says how states that are codes are kept: `description.label`, by name."""


# ---- moments --------------------------------------------------------------------------------------------------------


def start(kind: Storage, name: str, parameter: Tensor, shape: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """The tensors of a moment that is zero, of that shape or the parameter's.

    Raises:
        OptimizerError: the parameter is spread over ranks, and the moment would be codes.
    """
    like = parameter if shape is None or parameter.shape == shape else parameter.new_empty(shape)
    if kind.dtype is not None:
        return {number: torch.zeros_like(like, dtype=kind.dtype) for number in kind.numbers(name)}
    return encode(kind, name, torch.zeros_like(like, dtype=torch.float32))


def encode(kind: Storage, name: str, values: Tensor) -> dict[str, Tensor]:
    """The tensors that float32 values are kept in.

    Raises:
        OptimizerError: as `start`.
    """
    if kind.dtype is None and is_spread(values):
        raise OptimizerError(
            f"moment {name!r} of a sharded parameter of shape {tuple(values.shape)} would be kept as {kind}: shards "
            "have no tiles yet. Keep moments in fp32, bf16 or fp16 under fully_shard"
        )
    return codes.store(kind, name, values)


def labels(kinds: Mapping[str, Storage]) -> dict[str, str]:
    """What `FORMATS` says of states that are codes."""
    return {n: label(k.quantizer) + ", flat" * k.flat for n, k in kinds.items() if k.dtype is None}


# ---- saved states ---------------------------------------------------------------------------------------------------


def foreign(saved: Mapping[str, Any], recipe: Recipe, master: Master) -> frozenset[str]:
    """What masters of other recipes kept in a saved state."""
    own = {*get_master(recipe.master).keeps, *master.keeps}
    return frozenset(name for name in saved if is_master(name) and name not in own)


def adopt(
    saved: Mapping[str, Any],
    parameter: Tensor,
    kinds: Mapping[str, Storage],
    shapes: Mapping[str, tuple[int, ...]],
    masters: Iterable[Master],
    formats: Mapping[str, str] | None,
    number: object,
) -> dict[str, Any]:
    """A parameter's saved state as `kinds` keep its moments, on the parameter's device, sharing no memory with it.

    A master alone says that no step was taken. torch.optim.SGD counts none: with a momentum there was at least one.

    Args:
        kinds: of the rule's moments, and of a master that takes updates in place of codes, by name.
        shapes: of moments, where not the parameter's own.
        masters: whose tensors keep the dtypes that they have there.
        formats: what the saved groups say of states that are codes (`labels`).

    Raises:
        OptimizerError: it belongs to a parameter of another shape, holds codes of another format, or moments of a
            subspace where the parameter has none, or the other way round.
    """
    _check_subspace(saved, kinds, shapes, parameter, number)
    state: dict[str, Any] = {}
    keeps = {name: dtype for master in masters for name, dtype in master.keeps.items()}
    parts = {part for name, kind in kinds.items() for part in _every_part(kind, name)}
    coded = {name: format for name, format in (formats or {}).items() if isinstance(saved.get(name), Tensor)}
    for name in coded.keys() - kinds.keys():
        raise OptimizerError(_other_codes(name, coded[name], "values", number))
    for name, kind in kinds.items():
        if isinstance(saved.get(name), Tensor):
            shape = shapes.get(name, tuple(parameter.shape))
            state |= _kept(saved, name, kind, shape, parameter.device, coded.get(name), number)
    for name, value in saved.items():
        if name in parts:
            continue
        if not isinstance(value, Tensor):
            if value is not None:
                state[name] = value
        elif name == "step":
            state[name] = value.detach().to("cpu", torch.float32, copy=True)
        else:
            _check_shape(value, tuple(parameter.shape), name, number)
            state[name] = value.detach().to(parameter.device, keeps.get(name, value.dtype), copy=True)
    if "step" not in state and any(name in kinds for name in state):
        state["step"] = torch.ones((), dtype=torch.float32)
    return state


def _every_part(kind: Storage, name: str) -> tuple[str, ...]:
    """The names of everything that a moment may be made of, with a residual and without."""
    return Storage(kind.quantizer, residual=True).parts(name)


def _kept(
    saved: Mapping[str, Any],
    name: str,
    kind: Storage,
    shape: tuple[int, ...],
    device: torch.device,
    format: str | None,
    number: object,
) -> dict[str, Tensor]:
    value: Tensor = saved[name]
    own = labels({name: kind}).get(name)
    if value.dtype == torch.float32 and tuple(value.shape) == shape and f"{name}_scale" not in saved:
        format = None  # a tensor too small to be codes
    if not value.is_floating_point() or format is not None or f"{name}_scale" in saved:
        if format is None or format != own:
            raise OptimizerError(_other_codes(name, format, kind, number))
        expected = kind.layout(name, shape)
        for part, (dtype, shape) in expected.items():
            found = saved.get(part)
            if not isinstance(found, Tensor) or (found.dtype, tuple(found.shape)) != (dtype, shape):
                what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
                raise OptimizerError(
                    f"the state of parameter {number} holds {part} as {what}, expected {dtype} {shape}: it belongs to "
                    "another model"
                )
        return {part: saved[part].detach().to(device, copy=True) for part in expected}
    _check_shape(value, shape, name, number)
    twice = Storage(kind.quantizer, residual=True).numbers(name)
    found = {part: saved[part].detach() for part in twice if isinstance(saved.get(part), Tensor)}
    if kind.dtype is not None and found.keys() == set(kind.numbers(name)):
        return {part: number.to(device, kind.dtype, copy=True) for part, number in found.items()}
    numbers = [number.to(device, torch.float32) for number in found.values()]
    return encode(kind, name, sum(numbers[1:], numbers[0]))


def _other_codes(name: str, format: str | None, kind: object, number: object) -> str:
    return (
        f"the state of parameter {number} holds {name} as codes ({format or 'of a format it does not name'}); this "
        f"recipe keeps it as {kind}. Resume under the recipe that it was saved under, or load the weights alone and "
        "start the optimizer anew"
    )


def _check_shape(value: Tensor, shape: tuple[int, ...], name: str, number: object) -> None:
    if tuple(value.shape) != shape and value.dim():
        raise OptimizerError(
            f"the state of parameter {number} holds {name} of shape {tuple(value.shape)}, "
            f"expected {shape}: it belongs to another model"
        )


def _check_subspace(
    saved: Mapping[str, Any],
    kinds: Mapping[str, Storage],
    shapes: Mapping[str, tuple[int, ...]],
    parameter: Tensor,
    number: object,
) -> None:
    """Moments of a subspace are nothing without its projector, and a whole gradient's have no place in one."""
    found, remedy = saved.get(PROJECTOR), "Resume as it was saved, or load the weights alone and start anew"
    if found is not None and PROJECTOR not in kinds:
        raise OptimizerError(
            f"the state of parameter {number} holds moments in a subspace and its projector (GaLore), and here a "
            f"parameter of shape {tuple(parameter.shape)} is not projected. {remedy}"
        )
    if PROJECTOR not in kinds or not any(name in saved for name in kinds):
        return
    if not isinstance(found, Tensor):
        what = "none" if found is None else f"a {type(found).__name__}"
        raise OptimizerError(
            f"the state of parameter {number} holds moments of the whole gradient, and here a parameter of shape "
            f"{tuple(parameter.shape)} is projected (GaLore): expected a projector of shape {shapes[PROJECTOR]}, found "
            f"{what}. {remedy}"
        )
    if tuple(found.shape) != shapes[PROJECTOR]:
        raise OptimizerError(
            f"the state of parameter {number} holds a projector of shape {tuple(found.shape)}, expected "
            f"{shapes[PROJECTOR]}: it was saved with another rank or side. {remedy}"
        )
