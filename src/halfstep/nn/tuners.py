"""Adapters beside a model's layers (LoRA and its kin): which parameters are theirs, and layers' names without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import translate
from functools import cache

from torch import nn

from halfstep.recipe.high_precision import ADAPTER_NAMES


_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:base_model\.model|base_model|base_layer|original_module|modules_to_save\.[^.]+"
    r"|_checkpoint_wrapped_module|_orig_mod)\."
)
_COPIES = "modules_to_save"
_DECLARATIONS = ("adapter_layer_names", "other_param_names")  # of PEFT's tuner layers


def plain_name(name: str) -> str:
    """The name that a module or parameter has in a model without wrappers: PEFT wraps the layers that it adapts, torch
    those that it checkpoints or compiles.

    >>> plain_name("base_model.model.layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    """
    return _WRAPPERS.sub("", f"{name}.").removesuffix(".")


def matches(path: str, globs: str) -> bool:
    """Whether one of the globs on module paths, separated by `|`, matches that path, or the path without wrappers."""
    match = pattern(globs).match
    return bool(match(path) or match(plain_name(path)))


@cache
def pattern(globs: str) -> re.Pattern[str]:
    """What matches a path that one of the globs matches; they are separated by `|`."""
    return re.compile("|".join(map(translate, globs.split("|"))))


def same_parameters(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[nn.Parameter, str]]:
    """The parameters that had those names, though adapters were added or taken away since, each with its name then."""
    known = set(names)
    plain = {plain_name(name): name for name in known}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        then = name if name in known else plain.get(plain_name(name))
        if then is not None:
            yield parameter, then


def adapters_of(model: nn.Module) -> Callable[[str], bool]:
    """Whether a module or a parameter of that path belongs to an adapter: by LoRA's names and those of soft prompts, or
    since the layer around it declares it (`adapter_layer_names`, as every tuner layer of PEFT does).

    Copies of whole layers that are trained in their place (`modules_to_save`) are layers, and no adapters.
    """
    declared = tuple(
        f"{path}.{name}.".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for declaration in _DECLARATIONS
        if isinstance(names := getattr(type(module), declaration, None), tuple)
        for name in names
        if name != _COPIES
    )
    return lambda path: not _NAMES.isdisjoint(path.split(".")) or f"{path}.".startswith(declared)


_NAMES = frozenset(ADAPTER_NAMES)
