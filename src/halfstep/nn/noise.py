"""The keys of what layers draw, noise and signs: kept beside the layers, moved on with the optimizer's steps.

A key is the seed of the run and the layer's path, hashed, and the number of steps. `ops.part` hashes it with the
numbers that a pass takes, so that nothing is drawn from a generator and nothing is counted in a forward.
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
    """What a key is made of, beside the steps."""

    seed: int
    path: str
    """Without wrappers: a layer that is checkpointed draws what it would draw otherwise."""

    @property
    def number(self) -> int:
        """The two as one, in 64 bits with a sign."""
        number = derive_seed(self.seed, *self.path.encode())
        return number - (number >> 63 << 64)

    def key(self, device: torch.device) -> Tensor:
        """As it is before the first step."""
        return torch.tensor([self.number, 0], dtype=torch.int64, device=device)


def attach(model: nn.Module, paths: Sequence[str], seed: int) -> None:
    """Give the layers of those paths their keys: non-persistent buffers that DDP leaves alone."""
    for path in paths:
        module = model.get_submodule(path)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        origin = own_part(module).origin = _Origin(seed, plain_name(path))
        module.register_buffer(ATTRIBUTE, origin.key(device), persistent=False)
        extend(module, Surviving(ATTRIBUTE, _initial))
    ignore(model, [f"{path}.{ATTRIBUTE}".lstrip(".") for path in paths])


def detach(model: nn.Module) -> None:
    """Take every key away again."""
    for _, module, own in parts_of(model):
        if own.origin is not None:
            delattr(module, ATTRIBUTE)
            own.origin = None
    unignore(model, ATTRIBUTE)


def states_and_key(module: nn.Module, product: str = "") -> dict[str, Tensor]:
    """What a layer's product takes beside its operands: its scaling states, and the key of what it draws."""
    found, prefix = {}, f"{PREFIX}{product}__" if product else PREFIX
    for operand in OPERANDS:
        if (state := module._buffers.get(prefix + operand)) is not None:
            found[operand] = state
    if (key := module._buffers.get(ATTRIBUTE)) is not None:
        found[KEY] = key
    return found


def localize(model: nn.Module) -> None:
    """Take back layers' states and keys as plain tensors: torch's parallelize_module makes DTensors of all buffers."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            own: Any = buffer
            if name.startswith((PREFIX, ATTRIBUTE)) and hasattr(buffer, "device_mesh"):
                module._buffers[name] = own.to_local()


@torch.no_grad()
def advance(tables: list[dict[str, Tensor | None]]) -> None:
    """Count a step, on the keys' own device."""
    counts = [key[1:] for table in tables if (key := table.get(ATTRIBUTE)) is not None]
    if counts:
        torch._foreach_add_(counts, 1)


def seed(model: nn.Module) -> int | None:
    """The seed of the run; None where nothing is drawn."""
    return next((int(own.origin.seed) for _, _, own in parts_of(model) if own.origin is not None), None)


@torch.no_grad()
def reseed(model: nn.Module, seed: int) -> None:
    """Give the run another seed."""
    for _, module, own in parts_of(model):
        if (key := key_of(module)) is not None:
            own.origin = own.origin._replace(seed=seed)
            key[:1].fill_(own.origin.number)


def state(model: nn.Module) -> dict[str, int]:
    """What to save of the keys: the run's seed, and how many steps were made; empty where nothing is drawn."""
    own, keys = seed(model), (key for key in map(key_of, model.modules()) if key is not None)
    return {} if own is None else {"seed": own, "steps": int(next(keys)[1])}


@torch.no_grad()
def load(model: nn.Module, saved: Mapping[str, int]) -> None:
    """Put it back."""
    reseed(model, int(saved["seed"]))
    for key in map(key_of, model.modules()):
        if key is not None:
            key[1:].fill_(int(saved["steps"]))


def _initial(module: nn.Module, name: str, device: torch.device) -> Tensor:
    origin: _Origin = part_of(module).origin
    return origin.key(device)
