"""An optimizer's state that was saved under another recipe, or by another library's optimizer, taken where it can be.

States of bitsandbytes' and torchao's optimizers come under torch's names, with their codes as our storages keep such.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import OptimizerError
from halfstep.optim.checks import check_subspace
from halfstep.optim.states import Plan, labels
from halfstep.quant import Quantizer, Scales
from halfstep.quant.masters import Master
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import Tile
from halfstep.recipe import Recipe, Storage, is_master
from halfstep.recipe.spec import ADAM


State = Mapping[str, Any]
Labels = dict[str, str]

_NESTED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes puts what FSDP must not gather."""
_ENTRIES = ("state", "qmap", "absmax", "max", "new_max")
_BLOCKS = (256, 2048)
"""The blocks of bitsandbytes' versions, which every tensor of at least 4096 elements tells apart."""


class Changed:
    """Takes the states of one recipe's optimizer to another's: moments by value, masters where both keep them alike."""

    def __init__(self, other: str, recipe: Recipe) -> None:
        self._other, self._recipe = other, recipe
        self._dropped = self._begun = self._restarted = 0
        self._rounded: dict[str, str] = {}

    def kept(
        self,
        saved: State,
        plan: Plan,
        master: Master,
        formats: Mapping[str, str] | None,
        coded: Mapping[str, Storage],
        parameter: Tensor,
    ) -> tuple[State, Mapping[str, str]]:
        """What is taken of a parameter's saved state, and its formats. Moments of another subspace are dropped, and so
        is the step count then, by which Adam corrects moments that begin at zero."""
        formats = formats or {}
        masters = {name for name in saved if is_master(name)}
        alike = all(formats.get(name) == own for name, own in labels(coded).items()) and bool(master.keeps)
        for name, dtype in master.keeps.items():
            value = saved.get(name)
            same = isinstance(value, Tensor) and value.dtype == dtype and (coded or value.shape == parameter.shape)
            alike = alike and bool(same)
        state = {name: value for name, value in saved.items() if name not in masters or alike}
        self._dropped += bool(masters) and not alike
        self._begun += bool(master.keeps) and not alike
        try:
            check_subspace(state, plan.kinds, plan.shapes, parameter, "?")
        except OptimizerError:
            self._restarted += 1
            state = {name: value for name, value in state.items() if name in masters}
        for name, kind in plan.kinds.items():
            value, now = state.get(name), labels({name: kind}).get(name)
            was = formats.get(name) or (value.dtype if isinstance(value, Tensor) else None)
            narrower = was != (now or kind.dtype) or (f"{name}_residual" in state and not kind.residual)
            if was is not None and narrower and kind.dtype != torch.float32:
                self._rounded[name] = str(kind)
        return state, {name: format for name, format in formats.items() if name in state}

    def __str__(self) -> str:
        told = [f"{name} is rounded to {kind}" for name, kind in self._rounded.items()]
        if self._dropped:
            told.append(f"the masters of {self._dropped} parameters are dropped, and go on as their stored weights")
        if self._begun:
            told.append(f"masters of {self._begun} parameters begin from the present weights")
        if self._restarted:
            told.append(f"moments and step counts of {self._restarted} parameters begin at zero")
        if self._recipe.codes is not None or self._recipe.weights != "fp32":
            kept = self._recipe.weights if self._recipe.codes is None else str(self._recipe.codes.weights)
            told.append(f"weights that were kept in more bits are rounded to {kept}")
        return (
            f"the optimizer's state was saved under {self._other}, and goes on under {self._recipe.name!r}, as "
            f"recipe_change='allow' asks: {'; '.join(told) or 'all of it is taken as it is'}"
        )


def as_ours(
    saved: Mapping[str, Any], moments: Collection[str], shape: tuple[int, ...], number: object
) -> tuple[Mapping[str, Any], Labels]:
    """A parameter's saved state, and what it says of its codes: bitsandbytes' two moments as Adam's, torchao's by their
    parts or values; anything else as it is.

    Args:
        moments: the names of those that the rule keeps.
        shape: the parameter's.

    Raises:
        OptimizerError: a state of bitsandbytes that is not its Adam's, AdamW's or LAMB's, or where the rule does not
            keep Adam's moments.
    """
    found = {name: value for name, value in saved.items() if name != _NESTED} | dict(saved.get(_NESTED) or {})
    if "state1" in found:
        _check_bitsandbytes(found, moments, shape, number)
        own = {part + digit for part in _ENTRIES for digit in "12"} | {"unorm_vec", "gnorm_vec"}
        kept = {name: value for name, value in found.items() if name not in own}
        made = [_of_bitsandbytes(name, found, digit, number) for name, digit in zip(ADAM, "12", strict=True)]
    else:
        kept = {name: value for name, value in found.items() if not _decodes(value)}
        made = [_of_torchao(name, value) for name, value in found.items() if name not in kept]
    said: Labels = {}
    for tensors, label in made:
        kept |= tensors
        said |= label
    return kept, said


def _check_bitsandbytes(
    saved: Mapping[str, Any], moments: Collection[str], shape: tuple[int, ...], number: object
) -> None:
    held = {name: tuple(saved[name].shape) for name in ("state1", "state2") if isinstance(saved.get(name), Tensor)}
    if list(held.values()) == [shape] * len(ADAM) and set(ADAM) <= set(moments):
        return
    raise OptimizerError(
        f"the state of parameter {number} is one of bitsandbytes' optimizers, and does not say of which: "
        f"{', '.join(f'{name} of shape {found}' for name, found in held.items())}. Those of its Adam and AdamW, two of "
        f"shape {shape}, load into an optimizer that keeps {' and '.join(ADAM)}; this one keeps "
        f"{', '.join(sorted(moments)) or 'none'}. Load the weights alone, and start the optimizer from zero"
    )


def _of_bitsandbytes(
    name: str, saved: Mapping[str, Any], digit: str, number: object
) -> tuple[dict[str, Tensor], Labels]:
    codes, entries, largest = saved[f"state{digit}"], saved.get(f"qmap{digit}"), saved.get(f"absmax{digit}")
    if codes.is_floating_point():
        return {name: codes}, {}
    if codes.dtype == torch.uint8 and isinstance(entries, Tensor) and isinstance(largest, Tensor):
        size = next((size for size in _BLOCKS if largest.numel() == -(-codes.numel() // size)), None)
        if entries.numel() == 256 and size is not None:
            return _coded(name, codes, entries, largest, size)
    raise OptimizerError(
        f"the state of parameter {number} holds state{digit} of bitsandbytes as {codes.dtype}; expected uint8, a map "
        f"qmap{digit} of 256 numbers, and absmax{digit}, one for {' or '.join(map(str, _BLOCKS))} codes. Load the "
        "weights alone, and start the optimizer from zero"
    )


def _decodes(value: Any) -> bool:
    """Whether a tensor is a subclass that knows the values of its codes, as torchao's are."""
    return isinstance(value, Tensor) and type(value).dequantize is not Tensor.dequantize


def _of_torchao(name: str, value: Any) -> tuple[dict[str, Tensor], Labels]:
    if hasattr(value, "qmap") and value.qmap.numel() == 256:
        return _coded(name, value.codes, value.qmap, value.scale, value.codes.numel() // value.scale.numel())
    return {name: value.dequantize()}, {}


def _coded(name: str, codes: Tensor, entries: Tensor, largest: Tensor, size: int) -> tuple[dict[str, Tensor], Labels]:
    """Codes of a map, in blocks of a tensor laid out flat that share their largest magnitude: as such a storage keeps
    them where the map is one of ours, and as values where it is not."""
    values, flat = entries.detach().float(), codes.detach().reshape(1, -1)
    for format in (formats.get("dynamic8"), formats.get("dynamic8_unsigned")):
        if [format.decode(code) for code in range(256)] == values.tolist():
            storage = Storage(Quantizer(format, scales=Scales(Tile(1, size), get_scaling("absmax"))), flat=True)
            own = storage.names(name)
            return {own["codes"]: flat, own["scale"]: largest.detach().float().reshape(1, -1)}, labels({name: storage})
    scales_of_codes = largest.detach().float().flatten().repeat_interleave(size)[: codes.numel()]
    return {name: (values[flat[0].long()] * scales_of_codes).view(codes.shape)}, {}
