"""States of bitsandbytes' and torchao's optimizers under torch's names, with their codes as our storages keep such."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep import formats
from halfstep.errors import OptimizerError
from halfstep.optim.states import labels
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import Tile
from halfstep.recipe import Storage
from halfstep.recipe.spec import ADAM


_NESTED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes puts what FSDP must not gather."""
_ENTRIES = ("state", "qmap", "absmax", "max", "new_max")
_BLOCKS = (256, 2048)
"""The blocks of bitsandbytes' versions, which every tensor of at least 4096 elements tells apart."""

Labels = dict[str, str]


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
        ours = {name for name, value in found.items() if not _decodes(value)}
        kept = {name: value for name, value in found.items() if name in ours}
        made = [_of_torchao(name, value) for name, value in found.items() if name not in ours]
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
            scales = Scales(Tile(1, size), get_scaling("absmax"))
            storage = Storage(Quantizer(format, scales=scales), flat=True)
            own = storage.names(name)
            return {own["codes"]: flat, own["scale"]: largest.detach().float().reshape(1, -1)}, labels({name: storage})
    scales_of_codes = largest.detach().float().flatten().repeat_interleave(size)[: codes.numel()]
    return {name: (values[flat[0].long()] * scales_of_codes).view(codes.shape)}, {}
