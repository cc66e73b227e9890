"""Run a model in a format: the recipe for it, further recipes to try, or a cast by `model.to(dtype)`."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import formats
from halfstep.bits.what_if import Limits, limits_of
from halfstep.errors import FormatError, ModelError
from halfstep.formats import Format
from halfstep.nn.adapters import wide
from halfstep.probe.batch import Batch, call, moved
from halfstep.probe.observe import Site, observed
from halfstep.probe.trial import Failure, Outputs, Ran, Reference, Trial, crash, finite
from halfstep.quant import TENSOR, Quantizer, Scales, get_scaling
from halfstep.recipe import DTYPES, KEEP, LossScale, Recipe, Rule, get_recipe, linear_spec
from halfstep.text import grouped


_STORED = {
    "fp16": ("fp16-master", ("fp16-mixed", "bf16-master")),
    "bf16": ("bf16-master", ("bf16-mixed", "fp32")),
    "fp32": ("fp32", ()),
}


@dataclass(frozen=True)
class Target:
    """A format, the recipe that puts a model into it, and other recipes, the most similar first."""

    limits: Limits
    recipe: Recipe
    others: tuple[Recipe, ...]
    stored: bool
    """Whether whole tensors are stored in it; otherwise the operands of layers' matmuls are rounded to it."""

    @property
    def format(self) -> Format:
        """The format."""
        return self.limits.format


def target(to: object, loss_scale: float | None = None) -> Target:
    """The target of a format's name, a `Format` or a `torch.dtype`.

    fp16 and bf16 mean the whole model: weights, activations and gradients, as after `model.to(dtype)`, trained with the
    loss scale of fp16-master (fp16) or none. Any other format means the operands of all layers' matmuls, except heads
    and routers, rounded to it without a scale, and everything else in float32.

    Args:
        loss_scale: a constant one, instead of the recipe's.

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
    return Recipe(
        name,
        summary=f"Operands of products in {quantizer.format.name}, {scaled}; the rest in fp32.",
        source="halfstep probe",
        rules=(*KEEP, Rule("*", linear_spec(input=quantizer, weight=quantizer, grad_output=quantizer))),
    )


_TRIALS_EACH = 8
"""Trials of one recipe, each with one more module in float32."""


_MOST_KEPT = 0.5
"""The largest share of the parameters to keep in float32: with more, another format is better advice."""


def suggest(
    model: nn.Module,
    recipes: Sequence[Recipe],
    start: Iterable[Site],
    run: Callable[[Recipe], Trial],
    rejected: Trial,
) -> tuple[Trial, ...]:
    """Trials, ending with the first that passes; none passed if the last did not.

    Each recipe is tried with the modules of `start` in float32, then also with the first module that failed, and its
    counterparts in other blocks (`encoder.block.*.wo`); if a module fails that is in float32 already, with the module
    around it. When that covers most of the model, the next recipe is tried.

    Args:
        rejected: a trial that was run already; it is not run again, and never suggested.
    """
    trials = [] if rejected.passed else [rejected]
    places = tuple(dict.fromkeys(pattern(site.module) for site in start if site.module))
    for recipe in recipes:
        kept: tuple[str, ...] | None = places if recipe is recipes[0] else ()
        for _ in range(_TRIALS_EACH):
            if kept is None or _share(model, kept) > _MOST_KEPT:
                break
            wanted = keeping(recipe, kept)
            if wanted == rejected.recipe:
                if (failure := rejected.failure) is None:  # it passed on this data, but its ranges do not fit
                    break
            else:
                trials.append(run(wanted))
                if (failure := trials[-1].failure) is None:
                    return tuple(trials)
            kept = widened(model, kept, _maker(failure.site))
    return tuple(trials)


def _share(model: nn.Module, places: tuple[str, ...]) -> float:
    """The share of the parameters in those modules."""
    inside = {id(p): p.numel() for module in wide.find(model, places).values() for p in module.parameters()}
    return sum(inside.values()) / sum(p.numel() for p in model.parameters())


def keeping(recipe: Recipe, places: tuple[str, ...] = (), buffers: tuple[str, ...] = ()) -> Recipe:
    """The recipe with those modules, or buffers, in float32, under a new name."""
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
    """The modules to keep in float32 after the module at `path` failed; None if that would be the whole model."""
    # Module lists are never called, so their forward would not run.
    while path and (
        any(_covers(place, path) for place in kept)
        or isinstance(model.get_submodule(path), (nn.ModuleList, nn.ModuleDict))
    ):
        path = path.rpartition(".")[0]
    if not path:
        return None
    place = pattern(path)
    return (*(old for old in kept if not _covers(place, old)), place)


def pattern(path: str) -> str:
    """The path with its numbers replaced by globs.

    >>> pattern("encoder.block.0.layer.1.wo"), pattern("2")
    ('encoder.block.*.layer.*.wo', '2')
    """
    parts = path.split(".")
    return ".".join("*" if part.isdigit() and len(parts) > 1 else part for part in parts)


def _maker(site: Site) -> str:
    """The module whose code computed a tensor: for an input, the one around the module that took it."""
    return site.module.rpartition(".")[0] if site.role in ("input", "gradient of the output") else site.module


def _covers(place: str, path: str) -> bool:
    """Whether a glob matches a path or a module that contains it."""
    return fnmatchcase(path, place) or fnmatchcase(path, f"{place}.*")


@dataclass(frozen=True)
class CastTrial(Ran):
    """The result of running a model that was cast as a whole."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The call that casts it."""
        return f"model.to({self.dtype})"

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON data."""
        return self.told({"dtype": str(self.dtype).removeprefix("torch.")}, {})


@torch.no_grad()
def cast_trial(model: nn.Module, batches: Sequence[Batch], dtype: torch.dtype, expected: Reference) -> CastTrial:
    """Cast a copy of the model, and the batches, and run it forward over all of them.

    It fails at the first parameter, buffer, input or output that is finite in float32 but not in `dtype`, and if the
    model's output is off by more than `OUTPUT_ERROR`. A model that torch cannot run in `dtype` counts as crashed.
    """
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    stored = [*model.named_parameters(), *model.named_buffers()]
    inputs = [(f"input {name}", tensor) for batch in batches for name, tensor in _named(batch)]
    overflows = (_overflow(name, tensor, dtype, kinds) for name, tensor in [*stored, *inputs])
    failure = next((found for found in overflows if found is not None), None)
    device = next(model.parameters()).device
    own, look = copy.deepcopy(model).to(dtype), _OutputCheck(Outputs(expected))
    for batch in batches:
        with observed(own, look):
            try:
                call(own, moved(batch, device, dtype))
            except ModelError as error:
                failure = failure or look.failure or crash(model, error)
        look.compares = False
    failure = failure or look.failure or look.outputs.failure()
    return CastTrial(failure, look.outputs.by_module, dtype)


@dataclass
class _OutputCheck:
    """Records a pass's outputs: the first non-finite one, and the error of each."""

    outputs: Outputs
    compares: bool = True  # true for the first batch only
    failure: Failure | None = None

    def __call__(self, site: Site, tensor: Tensor) -> None:
        if self.failure is None and site.role == "output" and not finite(tensor):
            self.failure = Failure(site, "not finite")
        if self.compares:
            self.outputs.compare(site, tensor)


def _named(batch: Batch) -> list[tuple[object, Tensor]]:
    """The tensors of a batch, by name or position."""
    if isinstance(batch, Mapping):
        return [(name, value) for name, value in batch.items() if isinstance(value, Tensor)]
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    return [(number, value) for number, value in enumerate(parts) if isinstance(value, Tensor)]


def _overflow(name: str, tensor: Tensor, dtype: torch.dtype, kinds: Mapping[str, str]) -> Failure | None:
    path, _, role = name.rpartition(".")
    if not tensor.is_floating_point() or not finite(tensor) or finite(tensor.to(dtype)):
        return None
    return Failure(Site(path, kinds.get(path, ""), role), f"its largest, {float(tensor.abs().max()):g}, overflows")


_NOTABLE = 4
"""An error above this many times the format's relative rounding error is more than a rounded tensor causes by
itself."""


@dataclass(frozen=True)
class RoundedBuffer:
    """A buffer, and its counterparts in other blocks, rounded to a dtype with the rest of the model in float32."""

    name: str
    """Its path; indices of blocks are globs."""
    error: float
    """The largest relative change of a module's output, on the first batch."""
    module: str
    """The module whose output changed by that."""


@dataclass(frozen=True)
class Buffers:
    """The effect of rounding each kind of buffer of a model alone."""

    found: tuple[RoundedBuffer, ...] = ()
    """Every kind that rounding changes without overflow."""
    weights: float = 0.0
    """The relative change of the model's output when all weights are rounded."""
    size: float = 0.0
    """The format's relative rounding error."""
    arrived: tuple[str, ...] = ()
    """Buffers that were already rounded in the model: float32 was measured with them."""

    @property
    def harmful(self) -> tuple[RoundedBuffer, ...]:
        """Those that change a module's output by more than rounding all weights changes the model's, and by more than
        four times the format's rounding error."""
        return tuple(one for one in self.found if not one.error <= max(self.weights, _NOTABLE * self.size))

    def lines(self, format: str) -> list[str]:
        """The report's lines on them; none if none does harm."""
        said = [
            f"buffers: {one.name} rounded to {format}, as model.to() does, changes the output of "
            f"{one.module or 'the model'} by {one.error:.2g}; rounding all weights changes the model's by "
            f"{self.weights:.2g}. Errors of positions and frequencies grow with the length. Recipes leave buffers as "
            "they are, and one that names it in its float32_buffers refuses a model in which it was rounded"
            for one in self.harmful
        ]
        if self.arrived:
            said.append(
                f"buffers: {len(self.arrived)} arrived rounded to 16 bits ({self.arrived[0]}); what fp32 means here "
                "was measured with them: halfstep.audit says what to do"
            )
        return said


NONE = Buffers()


@torch.no_grad()
def rounded_buffers(
    model: nn.Module, batch: Batch, dtype: torch.dtype, expected: Reference
) -> tuple[RoundedBuffer, ...]:
    """The effect of rounding each kind of floating-point buffer to `dtype`, by its path. Kinds that do not change, and
    those that overflow, are left out. The model is not changed.

    Raises:
        ModelError: the model raised.
    """
    kinds = grouped(
        (pattern(name), buffer)
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and not torch.equal(buffer, buffer.to(dtype).to(buffer.dtype))
    )
    found = []
    for name, members in kinds.items():
        kept = [buffer.clone() for buffer in members]
        if not all(finite(buffer.to(dtype)) for buffer in members):
            continue
        for buffer in members:
            buffer.copy_(buffer.to(dtype))
        try:
            found.append(RoundedBuffer(name, *_changed(model, batch, expected)))
        finally:
            for buffer, value in zip(members, kept, strict=True):
                buffer.copy_(value)
    return tuple(found)


def _changed(model: nn.Module, batch: Batch, expected: Reference) -> tuple[float, str]:
    """The largest relative change of a module's output, and that module's name."""
    outputs = Outputs(expected)
    with observed(model, outputs.compare):
        call(model, batch)
    return max(((error, site.module) for site, error in outputs.errors.items()), default=(0.0, ""))
