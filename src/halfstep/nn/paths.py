"""Functions of module paths: names without wrappers, globs, adapters (LoRA and its kin), repeated blocks."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import translate
from functools import cache

from torch import nn

from halfstep.errors import RecipeError
from halfstep.recipe import Recipe, Rule
from halfstep.recipe.operands import ADAPTER_NAMES, chosen


_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:base_model\.model|base_model|base_layer|original_module|modules_to_save\.[^.]+"
    r"|_checkpoint_wrapped_module|_orig_mod)\."
)
_DECLARATIONS = ("adapter_layer_names", "other_param_names")  # of PEFT's tuner layers


def plain_name(name: str) -> str:
    """The name of a module or parameter without the wrappers of PEFT, activation checkpointing and torch.compile.

    >>> plain_name("base_model.model.layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    """
    return _WRAPPERS.sub("", f"{name}.").removesuffix(".")


def matches(path: str, globs: str) -> bool:
    """Whether one of the globs, separated by `|`, matches the path, with or without wrappers."""
    match = pattern(globs).match
    return bool(match(path) or match(plain_name(path)))


@cache
def pattern(globs: str) -> re.Pattern[str]:
    """A regular expression for paths that one of the globs, separated by `|`, matches."""
    return re.compile("|".join(map(translate, globs.split("|"))))


def same_parameters(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[nn.Parameter, str]]:
    """(parameter, name) for the parameters that had these names once, before adapters were added or removed."""
    known = set(names)
    plain = {plain_name(name): name for name in known}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        then = name if name in known else plain.get(plain_name(name))
        if then is not None:
            yield parameter, then


def adapters_of(model: nn.Module) -> Callable[[str], bool]:
    """A function of a path: whether that module or parameter belongs to an adapter, by the names of LoRA and of soft
    prompts, or by the declaration of the layer around it (`adapter_layer_names`, as in every tuner layer of PEFT).

    Copies of whole layers that are trained instead of them (`modules_to_save`) are layers, not adapters.
    """
    declared = tuple(
        f"{path}.{name}.".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for declaration in _DECLARATIONS
        if isinstance(names := getattr(type(module), declaration, None), tuple)
        for name in names
        if name != "modules_to_save"
    )
    return lambda path: not _NAMES.isdisjoint(path.split(".")) or f"{path}.".startswith(declared)


_NAMES = frozenset(ADAPTER_NAMES)


def stacks(model: nn.Module, layers: Collection[str]) -> dict[str, list[str]]:
    """The paths of the model's repeated blocks, by the path of the container that holds them.

    Blocks are the children of an nn.ModuleList, or of an nn.Sequential or nn.ModuleDict if all are of one class: at
    least two, each with some of the `layers` inside, and none a layer or a list itself. Containers within a block, such
    as experts, do not count.
    """
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        within = any(is_in(path, block) for blocks in found.values() for block in blocks)
        if within or not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        children = {f"{path}.{name}" if path else name: child for name, child in module.named_children()}
        alike = isinstance(module, nn.ModuleList) or len({type(child) for child in children.values()}) == 1
        parts = not any(isinstance(child, (nn.ModuleList, nn.ModuleDict)) for child in children.values())
        whole = all(block not in layers and any(is_in(layer, block) for layer in layers) for block in children)
        if len(children) > 1 and alike and parts and whole:
            found[path] = [*children]
    return found


def blocks_of(model: nn.Module, recipe: Recipe, rule: Rule, layers: Collection[str]) -> tuple[str, ...]:
    """The paths of the blocks that a rule with `blocks` selects.

    Raises:
        RecipeError: there are no blocks, and the rule is not optional; there are several stacks of blocks, and the
            rule's path does not select one; or there are fewer blocks than it numbers.
    """
    assert rule.blocks is not None
    meant = [layer for layer in layers if matches(layer, rule.path)]
    every = stacks(model, layers)
    found = {path: blocks for path, blocks in every.items() if any(is_in(layer, path) for layer in meant)}
    if not found and rule.optional:
        return ()
    name = f"recipe {recipe.name!r}: rule {rule.where!r}"
    if len(found) != 1:
        listed = ", ".join(f"{path or 'the model itself'} ({len(blocks)})" for path, blocks in found.items())
        one = f"{next(iter(found), 'layers')}."
        paths = " and ".join(f"'{path}.*'" for path in found)
        each = f"a rule for each stack in place of this one: the same with the paths {paths}"
        raise RecipeError(
            f"{name} chooses blocks by depth, and {type(model).__name__} has "
            f"{f'several stacks of them: {listed}' if found else 'none that its path matches'} (an nn.ModuleList, or "
            "an nn.Sequential or nn.ModuleDict of one class). In a recipe of your own, write "
            f"{each if found else 'a path that means one stack'} (dataclasses.replace(rule, path='{one}*'), of "
            f"recipe.rules); or leave out blocks, and name layers by globs, such as '{one}0.*'"
        )
    [(path, blocks)] = found.items()
    try:
        return tuple(blocks[number] for number in sorted(chosen(rule.blocks, len(blocks))))
    except RecipeError as error:
        raise RecipeError(f"{name}, {path or 'the model itself'}: {error}") from error


def is_in(path: str, above: str) -> bool:
    """Whether the module at `path` is the one at `above` or inside it."""
    return not above or path == above or path.startswith(f"{above}.")
