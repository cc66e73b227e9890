"""What running a model in a format means: the recipe that does it; and recipes to try when that is not safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from halfstep import formats
from halfstep.bits.limits import Limits, limits_of
from halfstep.errors import FormatError
from halfstep.formats import Format
from halfstep.nn.adapters import wide
from halfstep.probe.observe import Site
from halfstep.probe.trial import Trial
from halfstep.quant import TENSOR, Quantizer, Scales, get_scaling
from halfstep.recipe import DTYPES, KEEP, LossScale, Recipe, Rule, get_recipe, linear_spec


_STORED = {
    "fp16": ("fp16-master", ("fp16-mixed", "bf16-master")),
    "bf16": ("bf16-master", ("bf16-mixed", "fp32")),
    "fp32": ("fp32", ()),
}


@dataclass(frozen=True)
class Target:
    """A format, the recipe that puts a model into it, and other recipes, the most alike first."""

    limits: Limits
    recipe: Recipe
    others: tuple[Recipe, ...]
    stored: bool
    """Whether whole tensors are stored in it; otherwise the operands of layers' products are rounded to it."""

    @property
    def format(self) -> Format:
        """The format."""
        return self.limits.format


def target(to: object, loss_scale: float | None = None) -> Target:
    """The target of a format's name, a `Format` or a `torch.dtype`.

    fp16 and bf16 mean all of the model: weights, activations and gradients, as `model.to(dtype)` has them, trained with
    the loss scale of fp16-master (fp16) or none. Any other format means the operands of all layers' products, heads
    and routers apart, rounded to it without a scale, the rest in float32.

    Args:
        loss_scale: a constant one, in the place of the recipe's.

    Raises:
        FormatError: unknown format, a block format, or one without negative values.
    """
    format = formats.get(to)
    if not format.signed:
        raise FormatError(f"{format.name} has no negative values; probe one that can hold activations, such as e4m3fn")
    stored = format.name in DTYPES
    if stored:
        name, others = _STORED[format.name]
        recipes = [get_recipe(name), *map(get_recipe, others)]
    else:
        plain, scaled = Quantizer(format), Quantizer(format, scales=Scales(TENSOR, get_scaling("current")))
        recipes = [_rounding(f"{format.name}-unscaled", plain), _rounding(f"{format.name}-current", scaled)]
        recipes += [get_recipe("bf16-mixed")]
    if loss_scale is not None:
        recipes[0] = replace(recipes[0], loss_scale=LossScale(init=loss_scale, dynamic=False))
    return Target(limits_of(format, stored), recipes[0], tuple(recipes[1:]), stored)


def _rounding(name: str, quantizer: Quantizer) -> Recipe:
    scaled = "one scale a tensor, from its own amax" if quantizer.scales else "no scale"
    rules = (*KEEP, Rule("*", linear_spec(input=quantizer, weight=quantizer, grad_output=quantizer)))
    return Recipe(
        name,
        summary=f"Operands of products in {quantizer.format.name}, {scaled}; the rest in fp32.",
        source="halfstep probe",
        rules=rules,
    )


_ROUNDS = 8
"""Trials of one recipe, each keeping one more place in float32."""


_MOST = 0.5
"""The largest share of the parameters to keep in float32: with more, another format is the better advice."""
_LISTS = (nn.ModuleList, nn.ModuleDict)  # these are never called: a forward of theirs would not run


def suggest(
    model: nn.Module,
    recipes: Sequence[Recipe],
    start: Iterable[Site],
    run: Callable[[Recipe], Trial],
    rejected: Trial,
) -> tuple[Trial, ...]:
    """Trials, ending with the first that passes; none passed if the last did not.

    Each recipe is tried with the modules of `start` in float32, then also with the module that failed first, and like
    ones in other blocks (`encoder.block.*.wo`); where a module fails that is in float32 already, with the one around
    it. When that is most of the model, the next recipe is tried.

    Args:
        rejected: was run already; it is not run again, and is never the advice.
    """
    trials = [] if rejected.passed else [rejected]
    places = tuple(dict.fromkeys(pattern(site.module) for site in start if site.module))
    for recipe in recipes:
        kept: tuple[str, ...] | None = places if recipe is recipes[0] else ()
        for _ in range(_ROUNDS):
            if kept is None or _share(model, kept) > _MOST:
                break
            wanted = keeping(recipe, kept)
            if wanted == rejected.recipe:
                if (failure := rejected.failure) is None:  # it ran, and what it would lose in other data was too much
                    break
            else:
                trials.append(run(wanted))
                if (failure := trials[-1].failure) is None:
                    return tuple(trials)
            kept = widened(model, kept, _maker(failure.site))
    return tuple(trials)


def _share(model: nn.Module, places: tuple[str, ...]) -> float:
    """The share of the parameters that lie in those places."""
    inside = {id(p): p.numel() for module in wide.find(model, places).values() for p in module.parameters()}
    return sum(inside.values()) / sum(p.numel() for p in model.parameters())


def keeping(recipe: Recipe, places: tuple[str, ...] = (), buffers: tuple[str, ...] = ()) -> Recipe:
    """The recipe with those modules, or buffers, in float32, under a name of its own."""
    count, what = len(places or buffers), "modules" if places else "buffers"
    if not count:
        return recipe
    return replace(
        recipe,
        name=recipe.name if recipe.name.endswith("-kept") else f"{recipe.name}-kept",
        summary=f"{recipe.name} with {count} kind{'s' * (count > 1)} of {what} in float32.",
        source="halfstep probe",
        aliases=(),
        float32_modules=(*recipe.float32_modules, *places),
        float32_buffers=(*recipe.float32_buffers, *buffers),
    )


def widened(model: nn.Module, kept: tuple[str, ...], path: str) -> tuple[str, ...] | None:
    """What to keep in float32 when the module at `path` failed; None where that would be everything."""
    while path and (any(_covers(place, path) for place in kept) or isinstance(model.get_submodule(path), _LISTS)):
        path = path.rpartition(".")[0]
    if not path:
        return None
    place = pattern(path)
    return (*(old for old in kept if not _covers(place, old)), place)


def pattern(path: str) -> str:
    """The path with its numbers as globs.

    >>> pattern("encoder.block.0.layer.1.wo"), pattern("2")
    ('encoder.block.*.layer.*.wo', '2')
    """
    parts = path.split(".")
    return ".".join("*" if part.isdigit() and len(parts) > 1 else part for part in parts)


def _maker(site: Site) -> str:
    """The module whose code made a tensor: around the one that took it, for an input."""
    return site.module.rpartition(".")[0] if site.role in ("input", "gradient of the output") else site.module


def _covers(place: str, path: str) -> bool:
    """Whether a glob matches a path or a module around it."""
    return fnmatchcase(path, place) or fnmatchcase(path, f"{place}.*")
