"""A model's repeated blocks, in the order of its depth: for rules that choose layers by it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from halfstep.errors import RecipeError
from halfstep.nn.tuners import matches
from halfstep.recipe import Recipe, Rule
from halfstep.recipe.blocks import chosen


def stacks(model: nn.Module, layers: Collection[str]) -> dict[str, list[str]]:
    """The paths of the model's blocks, by the path of the module that holds them.

    Blocks are the children of an nn.ModuleList, or of an nn.Sequential or nn.ModuleDict where they are all of one
    class: two at least, each with some of the `layers` inside, and none a layer or a list itself. Such modules within a
    block, as experts are, are no stacks.
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
    """The paths of the blocks that a rule with `blocks` means.

    Raises:
        RecipeError: no blocks are found, and the rule is not optional; or several stacks of them, of which its path
            does not choose one; or fewer blocks than it numbers.
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
    """Whether a module lies in another one, or is it."""
    return not above or path == above or path.startswith(f"{above}.")
