"""Which layers of a model may round the operands of their products, and what a recipe's rules say about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import nn

from halfstep.errors import RecipeError
from halfstep.nn.adapters import gated, linear
from halfstep.recipe import LinearSpec, Recipe


ModuleFilter = Callable[[nn.Module, str], bool]


class Kind(Protocol):
    """An adapter: one kind of layer whose products follow a `LinearSpec`."""

    NAME: str
    PRODUCTS: tuple[str, ...]
    """Its products with scaling states of their own; ("",) for a layer with one."""

    @property
    def fits(self) -> Callable[[nn.Module], bool]:
        """Whether `forward` may stand in for the module's own."""

    @property
    def forward(self) -> Callable[..., Any]:
        """forward(stock, module, *args, **kwargs), with the spec at module._halfstep_linear."""


KINDS: tuple[Kind, ...] = (linear,)


@dataclass(frozen=True)
class Matched:
    """What a recipe's rules say about a model."""

    kinds: dict[str, Kind]
    """Every layer whose products could be rounded, by path."""
    specs: dict[str, LinearSpec]
    """Those that are."""
    kept: dict[str, str]
    """Those that a rule matches and that are not, with the reason."""
    smoothed: tuple[str, ...]
    """The gated MLPs whose product is scaled."""


def match(model: nn.Module, recipe: Recipe, module_filter: ModuleFilter | None) -> Matched:
    """Decide layer by layer: the first rule that matches a path decides.

    Raises:
        RecipeError: a rule, the filter, or the recipe's smoothing selects no layer.
    """
    kinds = {path: kind for path, module in model.named_modules() if (kind := _kind(module)) is not None}
    refused = {path: why for path, module in model.named_modules() if path not in kinds and (why := _refusal(module))}
    chosen = {p for p in kinds if module_filter is None or module_filter(model.get_submodule(p), p)}
    specs: dict[str, LinearSpec] = {}
    kept: dict[str, str] = {}
    for rule in recipe.rules:
        hits = [path for path in kinds if path not in specs | kept and fnmatchcase(path, rule.path)]
        if rule.linear.rounds:
            specs |= dict.fromkeys(hits, rule.linear)
        else:
            kept |= dict.fromkeys(hits, rule.why or "kept by the recipe")
        for path, why in refused.items():
            if path not in kept and fnmatchcase(path, rule.path):
                kept[path] = why if rule.linear.rounds else rule.why or "kept by the recipe"
        if not hits and not rule.optional:
            near = get_close_matches(rule.path, kinds, n=3, cutoff=0.0)
            raise RecipeError(
                f"recipe {recipe.name!r}: rule {rule.path!r} matched no linear layer. "
                f"Nearest: {', '.join(near) or 'the model has no nn.Linear'}"
            )
    if specs and not chosen & specs.keys():
        raise RecipeError(
            f"recipe {recipe.name!r}: module_filter selects none of the {len(specs)} linear layers its rules match"
        )
    specs = {path: spec for path, spec in specs.items() if path in chosen}
    smoothed: tuple[str, ...] = ()
    if recipe.smooth_glu is not None:
        smoothed, rough = _gated(model, recipe, specs)
        kept |= rough
    return Matched(kinds, specs, kept, smoothed)


def _kind(module: nn.Module) -> Kind | None:
    return next((kind for kind in KINDS if kind.fits(module)), None)


def _refusal(module: nn.Module) -> str | None:
    """Why a module that multiplies by a matrix cannot follow a rule; None where it has nothing to multiply by."""
    if isinstance(module, nn.Linear):
        return "its forward is not nn.Linear's"
    return None


def _gated(model: nn.Module, recipe: Recipe, specs: Mapping[str, LinearSpec]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The gated MLPs whose down-projection rounds, and those that cannot be smoothed, with the reason."""
    found = {path: module for path, module in model.named_modules() if gated.resembles(module)}
    refused = {path: why for path, module in found.items() if (why := gated.refusal(module)) is not None}
    if not found.keys() - refused.keys():
        raise RecipeError(
            f"recipe {recipe.name!r} smooths gated MLPs (modules with gate_proj, up_proj, down_proj and act_fn), and "
            f"{type(model).__name__} has none{_first(refused)}; take a recipe without smooth_glu, such as fp8-delayed"
        )
    rounds = [path for path in found if path not in refused and _child(path, "down_proj") in specs]
    return tuple(rounds), refused


def _child(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _first(refused: Mapping[str, str]) -> str:
    return next((f" that fits ({path}: {why})" for path, why in refused.items()), "")
