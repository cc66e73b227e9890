"""The noise keys of layers, for stochastic rounding and random signs: buffers of the layers.

A key is a hash of the run's seed and the layer's path, and the number of optimizer steps. `ops.part` hashes it with a
sample of the values that a pass takes, so no generator is used and no forward is counted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.nn.adopt import extend
from halfstep.nn.paths import plain_name
from halfstep.nn.scaling import PREFIX, Surviving, ignore, unignore
from halfstep.ops.part import ATTRIBUTE, KEY, key_of, own_part, part_of, parts_of
from halfstep.quant import derive_seed
from halfstep.recipe.products import OPERANDS


class _Origin(NamedTuple):
    """The run's seed and the layer's path, from which a key is made."""

    seed: int
    path: str
    """Without wrappers, so that a layer draws the same noise with and without checkpointing."""

    @property
    def number(self) -> int:
        """The hash of both, a signed 64-bit integer."""
        number = int(derive_seed(self.seed, *self.path.encode()))
        return number - (number >> 63 << 64)

    def key(self, device: torch.device) -> Tensor:
        """The key before the first step: int64 (hash, 0)."""
        return torch.tensor([self.number, 0], dtype=torch.int64, device=device)


def attach(model: nn.Module, paths: Sequence[str], seed: int) -> None:
    """Register the noise keys of these layers: non-persistent buffers that DDP does not broadcast."""
    for path in paths:
        module = model.get_submodule(path)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        origin = own_part(module).origin = _Origin(seed, plain_name(path))
        module.register_buffer(ATTRIBUTE, origin.key(device), persistent=False)
        extend(module, Surviving(ATTRIBUTE, _initial))
    ignore(model, [f"{path}.{ATTRIBUTE}".lstrip(".") for path in paths])


def detach(model: nn.Module) -> None:
    """Remove all noise keys."""
    for _, module, own in parts_of(model):
        if own.origin is not None:
            delattr(module, ATTRIBUTE)
            own.origin = None
    unignore(model, ATTRIBUTE)


def states_and_key(module: nn.Module, product: str = "") -> dict[str, Tensor]:
    """The scaling states of one of a layer's matmuls, by operand, and the layer's noise key under "noise"."""
    found, prefix = {}, f"{PREFIX}{product}__" if product else PREFIX
    for operand in OPERANDS:
        if (state := module._buffers.get(prefix + operand)) is not None:
            found[operand] = state
    if (key := module._buffers.get(ATTRIBUTE)) is not None:
        found[KEY] = key
    return found


def localize(model: nn.Module) -> None:
    """Make scaling states and noise keys plain tensors again: torch's parallelize_module makes DTensors of all
    buffers."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            own: Any = buffer
            if name.startswith((PREFIX, ATTRIBUTE)) and hasattr(buffer, "device_mesh"):
                module._buffers[name] = own.to_local()


@torch.no_grad()
def advance(tables: list[dict[str, Tensor | None]]) -> None:
    """Add 1 to the step count of all noise keys, on their device.

    Args:
        tables: the `_buffers` of the modules with keys.
    """
    counts = [key[1:] for table in tables if (key := table.get(ATTRIBUTE)) is not None]
    if counts:
        torch._foreach_add_(counts, 1)


def seed(model: nn.Module) -> int | None:
    """The run's seed for noise; None if no layer draws noise."""
    return next((int(own.origin.seed) for _, _, own in parts_of(model) if own.origin is not None), None)


@torch.no_grad()
def reseed(model: nn.Module, seed: int) -> None:
    """Set the run's seed for noise."""
    for _, module, own in parts_of(model):
        if (key := key_of(module)) is not None:
            own.origin = own.origin._replace(seed=seed)
            key[:1].fill_(own.origin.number)


def state(model: nn.Module) -> dict[str, int]:
    """The run's seed and the number of steps, to be saved; empty if no layer draws noise."""
    own, keys = seed(model), (key for key in map(key_of, model.modules()) if key is not None)
    return {} if own is None else {"seed": own, "steps": int(next(keys)[1])}


@torch.no_grad()
def load(model: nn.Module, saved: Mapping[str, int]) -> None:
    """Restore what `state` returned."""
    reseed(model, int(saved["seed"]))
    for key in map(key_of, model.modules()):
        if key is not None:
            key[1:].fill_(int(saved["steps"]))


def _initial(module: nn.Module, name: str, device: torch.device) -> Tensor:
    origin: _Origin = part_of(module).origin
    return origin.key(device)
