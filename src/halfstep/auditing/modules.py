"""What modules say of their parameters and buffers: which are averages, multiplied by, saved, or frozen alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from inspect import getclosurevars, isfunction, unwrap
from itertools import chain
from typing import Any

from torch import nn

from halfstep.inspection.roles import role_of
from halfstep.nn.buffers import buffers
from halfstep.ops.part import parts_of


_AVERAGED = (nn.modules.batchnorm._NormBase,)
_MULTIPLIES = (nn.Linear, nn.modules.conv._ConvNd)


def saved(model: nn.Module) -> dict[str, bool]:
    """The floating-point buffers that are no scales beside codes, and whether state dicts hold them."""
    parents = dict(model.named_modules())
    places = ((name, *name.rpartition(".")[::2]) for name in buffers(model))
    return {name: last not in parents[path]._non_persistent_buffers_set for name, path, last in places}


def decays(model: nn.Module) -> dict[str, float]:
    """What averages a <- d a + (1 - d) x in a model keep of themselves, by the name of a: running statistics, and the
    copies of models and the buffers of modules that say a `decay`, such as torch's AveragedModel with its function.
    """
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        if isinstance(module, _AVERAGED):
            if module.track_running_stats and module.momentum is not None:
                found |= dict.fromkeys((f"{dot}running_mean", f"{dot}running_var"), 1 - module.momentum)
        elif (decay := _decay(module)) is not None:
            found |= {dot + name: decay for name, _ in chain(module.named_parameters(), module.named_buffers())}
    return found


def _decay(module: nn.Module) -> float | None:
    """The share that a module says it keeps: as an attribute, or in the closure of its averaging function."""
    said: list[Any] = [vars(module).get(name) for name in ("decay", "ema_decay", "beta")]
    for function in filter(isfunction, (vars(module).get("multi_avg_fn"), vars(module).get("avg_fn"))):
        said.append(getclosurevars(unwrap(function)).nonlocals.get("decay"))
    return next((value for value in said if isinstance(value, float) and 0 < value < 1), None)


def products(model: nn.Module) -> set[str]:
    """The weights that one layer alone has, and multiplies by."""
    used = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {
        f"{path}.weight" if path else "weight"
        for path, module in model.named_modules()
        if isinstance(module, _MULTIPLIES) and used[id(module._parameters.get("weight"))] == 1
    }


def frozen_norms(model: nn.Module) -> Iterator[str]:
    """The parameters of norms that do not train in blocks of which all else does; those with running statistics are
    frozen on purpose, and so are all of a base whose adapters train beside its codes.
    """
    if any(getattr(own.applied, "adapts", False) for _, _, own in parts_of(model)):
        return
    norms = {module for module in model.modules() if _is_norm(module)}
    for path, parent in model.named_modules():
        own = {name: child for name, child in parent.named_children() if child in norms}
        beside = {p for child in parent.children() if child not in norms for p in _outside(child, norms)}
        if beside and all(p.requires_grad for p in beside):
            for name, norm in own.items():
                if not any(p.requires_grad for p in norm.parameters()):
                    place = f"{path}.{name}" if path else name
                    yield from (f"{place}.{last}" for last, _ in norm.named_parameters())


def _outside(module: nn.Module, norms: set[nn.Module]) -> Iterator[nn.Parameter]:
    for part in module.modules():
        if part not in norms:
            yield from (p for p in part._parameters.values() if p is not None)


def _is_norm(module: nn.Module) -> bool:
    statistics = isinstance(module, _AVERAGED) or "running_mean" in module._buffers
    return role_of(type(module).__name__) == "norm" and not statistics and not [*module.children()]
