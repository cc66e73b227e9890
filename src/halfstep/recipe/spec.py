"""`Recipe`: frozen data with the format of each part of training."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any

import torch

from halfstep import formats
from halfstep.errors import RecipeError, unknown
from halfstep.quant.masters import get_master, list_masters
from halfstep.quant.rounding import check_rounding
from halfstep.recipe.operands import Rule, shared_in_a_call, to_data
from halfstep.recipe.products import AttentionSpec, linear_text
from halfstep.recipe.projection import LARGEST, PROJECTOR, SMALLEST, Projection, Shape
from halfstep.recipe.stages import Stage, check_stages
from halfstep.recipe.storage import DTYPES, Codes, Communication, Saved, Storage, get_storage
from halfstep.text import shortened


MASTER = "master"
"""The name, in an optimizer's state, of an fp32 master, and of the master of a weight stored as codes."""


def is_master(state: str) -> bool:
    """Whether an entry of that name in an optimizer's state belongs to a master."""
    return state.startswith(MASTER) or any(state in get_master(master).keeps for master in list_masters())


ADAM = ("exp_avg", "exp_avg_sq")
"""The moments of Adam and AdamW, by torch's names."""


SMOOTH_GLU = {
    "channel": "Smooth-SwiGLU, a power of two a channel, which merges into the weights",
    "token": "Smooth-SwiGLU, a scale a token",
}
"""How the gated product of an MLP is scaled before the down-projection rounds it (`ops.smooth_swiglu`)."""


@dataclass(frozen=True)
class LossScale:
    """The loss scale: constant, or doubled after `growth_interval` steps without overflow and halved on overflow.

    Source: Micikevicius et al. 2018 (constant); torch.amp.GradScaler (dynamic, and its defaults).
    """

    init: float = 2.0**16
    dynamic: bool = True
    growth_interval: int = 2000
    hysteresis: int = 1

    def __post_init__(self) -> None:
        if type(self.init) not in (int, float) or not SMALLEST <= self.init <= LARGEST:
            raise RecipeError(
                f"loss_scale init = {self.init!r}; expected a number from {SMALLEST:g} to {LARGEST:g}, as float32 has "
                "them, such as 65536"
            )
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RecipeError(f"loss_scale {name} = {value!r}; expected an integer of at least 1")

    @property
    def scales(self) -> bool:
        """Whether it can multiply a loss by a factor other than 1."""
        return self.dynamic or self.init != 1

    def __str__(self) -> str:
        return f"dynamic from {self.init:g}" if self.dynamic else f"constant {self.init:g}"


@dataclass(frozen=True)
class BytesPerParameter:
    """The bytes of one parameter by role; `transient` ones exist only during a forward or backward pass."""

    weights: float
    grads: float
    master: float
    states: float
    transient: float = 0.0

    @property
    def total(self) -> float:
        """The persistent bytes: weights + gradients + master + optimizer states."""
        return self.weights + self.grads + self.master + self.states

    def __str__(self) -> str:
        terms = f"weights {self.weights:g} + grads {self.grads:g} + master {self.master:g} + states {self.states:g}"
        cache = f" (and up to {self.transient:g} while a pass runs: autocast's copies)" if self.transient else ""
        return f"{terms} = {self.total:g}{cache}"


@dataclass(frozen=True)
class Recipe:
    """The format of each part of training, and how layers round.

    Raises:
        RecipeError: an unknown format or rounding, or an invalid combination.
    """

    name: str
    summary: str
    source: str
    weights: str = "fp32"
    """The format in which parameters are stored."""
    grads: str | None = None
    """The format in which gradients accumulate; None: that of the weights."""
    master: str | None = None
    """The kind of master weights (`quant.masters`); None: the weights themselves are updated."""
    moments: str | Storage | tuple[tuple[str, str | Storage], ...] = "fp32"
    """How the optimizer's moments are stored: all alike, or pairs of a glob on torch's names (`exp_avg`, `exp_avg_sq`,
    `momentum_buffer`) and a format or `Storage`. The first match decides; moments without a match are fp32."""
    update_rounding: str = "nearest_even"
    """How an updated weight is rounded to its stored format."""
    compute: str = "fp32"
    """The dtype of torch.autocast around the model's forward; fp32: no autocast."""
    loss_scale: LossScale | None = None
    rules: tuple[Rule, ...] = ()
    """Which layers round their operands, and how."""
    codes: Codes | None = None
    """How the weights that rules round, their gradients and masters are stored, if not as `weights`, `grads` and
    `master` say."""
    projection: Projection | None = None
    """Which matrices are updated in a subspace of their gradients. The entry `projector` of `moments` says how its
    vectors are stored."""
    float32_modules: tuple[str, ...] = ()
    """Modules that compute in float32 under autocast, with float32 weights: globs on their classes' names or paths."""
    float32_adapters: bool = True
    """Whether adapters (LoRA's factors and whatever else PEFT trains beside a layer) have float32 weights, whatever
    `weights` says, and are not rounded by rules."""
    float32_functions: tuple[str, ...] = ()
    """torch's functions, by name (`softmax`, `exp`, `sum` ...), that compute 16-bit inputs in float32 under autocast,
    in addition to autocast's own list; methods and operators of these names too."""
    float32_buffers: tuple[str, ...] = ()
    """Buffers, by globs on their paths (`*.inv_freq`), that must be float32 and unrounded: a model in which a cast
    rounded them raises. No recipe casts buffers."""
    attention: AttentionSpec | None = None
    """How attention rounds the operands of its two matmuls, in modules of torch's or ours."""
    smooth_glu: str | None = None
    """How gated MLPs scale their gated product before the down-projection rounds it (a key of `SMOOTH_GLU`)."""
    saved: Saved | None = None
    """How tensors saved for backward are stored, if not as they are."""
    communication: Communication | None = None
    """The formats in which data parallelism sends gradients and gathers sharded weights, if not as they are stored
    (`halfstep.distributed`)."""
    unit_scaled: bool = False
    """Whether the model must be unit-scaled (`halfstep.unit_scale`), since the recipe has no scales."""
    batch_invariant: bool = False
    """Whether to check that a row's result does not depend on the other rows of its call."""
    stages: "tuple[Stage[Recipe], ...]" = ()
    """Recipes that take over from this one during training; the fields above are the first stage."""
    aliases: tuple[str, ...] = ()
    """Other names, such as apex's optimization levels."""
    notes: tuple[str, ...] = ()
    """Where the source and this recipe differ, for `recipes show`."""

    def __post_init__(self) -> None:
        check_rounding(self.update_rounding)
        for fault in self._faults():
            raise RecipeError(f"recipe {self.name!r}: {fault}")
        check_stages(self, self.stages)
        if self.batch_invariant and self.shared_in_a_call:
            raise RecipeError(
                f"recipe {self.name!r}: batch_invariant, and rows of a call share {'; '.join(self.shared_in_a_call)}. "
                "Give operands scales of a row or of blocks of one ('fp8-rowwise', 'fp8-block', 'mxfp8' have such), or "
                "leave batch_invariant out"
            )

    def _faults(self) -> Iterator[str]:
        """Error messages for fields that are unknown or incompatible with others."""
        for role in ("weights", "grads", "compute"):
            if (name := getattr(self, role)) is not None and name not in DTYPES:
                yield f"{role} = {name!r}; tensors are stored as {', '.join(DTYPES)}"
        for name, _ in self._moments:
            try:
                self.moment(name)
            except RecipeError as error:
                yield f"moments: {error}"
        for name in self.float32_functions:
            if not any(callable(getattr(module, name, None)) for module in (torch, torch.nn.functional)):
                yield unknown("function of torch", name, dir(torch.nn.functional))
        if self.float32_functions and self.compute == "fp32":
            yield (
                "float32_functions with compute = 'fp32', where all functions are: name a 16-bit compute dtype, or "
                "leave them out"
            )
        if self.update_rounding != "nearest_even" and self.weights == "fp32":
            yield (
                f"update_rounding = {self.update_rounding!r} with fp32 weights, which an update in float32 never "
                "rounds; store the weights in bf16 or fp16, or drop it"
            )
        try:
            beside = get_master(self.master).weights
        except RecipeError as error:
            yield str(error)
        if self.master is not None and self.weights == "fp32":
            yield "fp32 weights are their own master; set master to None"
        if self.weights not in beside:
            yield f"master = {self.master!r} stands beside {' or '.join(beside)} weights, not {self.weights}"
        if self.smooth_glu is not None and self.smooth_glu not in SMOOTH_GLU:
            yield unknown("smooth_glu", self.smooth_glu, SMOOTH_GLU)
        if self.codes is not None and (self.weights != "fp32" or not any(rule.linear.rounds for rule in self.rules)):
            yield (
                f"codes = {self.codes.weights} stores the weights that rules round, beside others in fp32; found "
                f"{len(self.rules)} rules and weights in {self.weights}"
            )
        if self.projection is not None and (self.codes is not None or self.moment(PROJECTOR).dtype is None):
            yield (
                f"projection, with codes = {self.codes} and moments: {PROJECTOR} kept as {self.moment(PROJECTOR)}; "
                "expected no codes, and vectors in fp32, bf16 or fp16: list them before `*`"
            )
        if self.saved is not None and self.saved.operands and not any(r.linear.input_codes for r in self.rules):
            yield (
                "saved = {operands = true} saves the codes of matmul inputs that have one scale a tensor and are "
                "rounded alike in both matmuls, but no rule rounds inputs so: give such a rule (as fp8-current has), "
                "or set operands to false"
            )
        if self.grads == self.weights:
            yield f"grads = {self.grads!r} is the weights' format; leave it out"

    @cached_property
    def by_stage(self) -> "tuple[Recipe, ...]":
        """The recipe of each stage, first to last; only itself if it has no stages."""
        return (replace(self, stages=()), *(stage.recipe for stage in self.stages)) if self.stages else (self,)

    @cached_property
    def grad_format(self) -> str:
        """The format of the gradients."""
        return self.grads or self.weights

    @cached_property
    def autocast(self) -> torch.dtype | None:
        """The dtype of torch.autocast around the model's forward; None for no autocast."""
        return None if self.compute == "fp32" else DTYPES[self.compute]

    @cached_property
    def keeps_states(self) -> bool:
        """Whether any scale depends on earlier steps."""
        return any(rule.linear.states for stage in self.by_stage for rule in stage.rules)

    @cached_property
    def shared_in_a_call(self) -> tuple[str, ...]:
        """Texts that say why a row's result depends on the other rows of a forward call, in any stage; () if not."""
        stages = self.by_stage
        return tuple(why for one in stages for why in shared_in_a_call(one.rules, one.attention, one.smooth_glu))

    @cached_property
    def _moments(self) -> tuple[tuple[str, str | Storage], ...]:
        return self.moments if isinstance(self.moments, tuple) else (("*", self.moments),)

    def moment(self, name: str, size: int | None = None) -> Storage:
        """The storage of the optimizer's moment of that name, for a parameter of `size` elements (None: many)."""
        for glob, kind in self._moments:
            if fnmatchcase(name, glob):
                kept = get_storage(kind)
                return kept if size is None or size >= kept.smallest else get_storage("fp32")
        return get_storage("fp32")

    def bytes_per_parameter(self, moments: Sequence[str] = ADAM, shape: Shape | None = None) -> BytesPerParameter:
        """The bytes of one parameter by role, for an optimizer with those moments, including scales of full tiles.

        With a `projection` they depend on the matrix: for one of the given `shape`; without a shape, for a parameter
        that is not projected, which takes the most. With `codes`, for a weight that rules round, without the scale of
        a whole tensor. `transient` is autocast's cast of each fp32 weight that a matmul uses, dropped when the forward
        ends: at most the size of its compute format.
        """

        def size(name: str | None) -> float:
            return formats.get(name).bytes if name else 0.0

        casts = max(size(stage.compute) if stage.compute != stage.weights else 0.0 for stage in self.by_stage)
        weights, grads, master = size(self.weights), size(self.grad_format), get_master(self.master).bytes
        if self.codes is not None:
            weights = self.codes.weights.bytes
            grads = self.codes.grads.bytes if self.codes.grads else grads
            master = self.codes.master.bytes if self.codes.master else 0.0
        states = sum(self.moment(name).bytes for name in moments)
        subspace = self.projection.subspace(shape) if self.projection and shape else None
        if subspace is not None and shape is not None:
            low = prod(subspace.moment(shape))
            beside = prod(subspace.projector(shape)) * self.moment(PROJECTOR).bytes
            states = (sum(self.moment(name, low).bytes for name in moments) * low + beside) / prod(shape)
        return BytesPerParameter(weights, grads, master, states, transient=casts)

    @property
    def batch_text(self) -> str:
        """Whether a row's results depend on the other rows, in one line."""
        shared = "; ".join(self.shared_in_a_call)
        return f"rows of a call share: {shared}" if shared else "no row's result depends on the other rows"

    def _kept(self) -> list[tuple[str, str]]:
        """A labelled line for each rule that rounds nothing."""
        kept = [rule for rule in self.rules if not rule.linear.rounds]
        return [("kept", f"{rule.why or 'by rule'}: {rule.where}") for rule in kept]

    def _attention(self) -> list[tuple[str, str]]:
        if self.attention is None:
            return []
        return [("attention", f"scores: {linear_text(self.attention.scores)}; mix: {linear_text(self.attention.mix)}")]

    def _moments_text(self) -> str:
        if not isinstance(self.moments, tuple):
            return str(self.moments)
        return ", ".join(("others" if name == "*" else name) + f" {self.moment(name)}" for name, _ in self.moments)

    def passes_text(self) -> str:
        """How the passes compute, in one line: the fields that may change between stages."""
        rules = [f"linear {rule.where!r} {linear_text(rule.linear)}" for rule in self.rules if rule.linear.rounds]
        parts = [
            "as stored" if self.compute == "fp32" else f"torch.autocast to {self.compute}",
            *([f"{', '.join(self.float32_functions)} in fp32"] if self.float32_functions else []),
            *(rules or ["no operand rounded"]),
            *(text for _, text in self._attention()),
            *([f"gated MLPs {SMOOTH_GLU[self.smooth_glu]}"] if self.smooth_glu else []),
            *([f"saved {self.saved}"] if self.saved else []),
        ]
        return "; ".join(parts)

    def __str__(self) -> str:
        return shortened([self.describe()])

    def to_dict(self) -> dict[str, Any]:
        """Every field as data for JSON and TOML, as `load_recipe` reads it.

        Raises:
            RecipeError: it has a custom scaling, which data cannot describe.
        """
        return to_data(self)

    def describe(self) -> str:
        """The whole recipe as text, one field a line, with its bytes per parameter."""
        rounding = f", update rounded {self.update_rounding}" if self.update_rounding != "nearest_even" else ""
        widened = (*self.float32_modules, *self.float32_functions, *self.float32_buffers)
        own = "the weights themselves" if self.weights == "fp32" else "none"
        lines = [
            ("weights", self.weights + rounding),
            ("gradients", self.grad_format),
            ("master", f"{self.master}, {get_master(self.master).bytes:g} bytes" if self.master else own),
            ("moments", self._moments_text()),
            ("compute", "as stored" if self.compute == "fp32" else f"torch.autocast to {self.compute}"),
            *[("in fp32", ", ".join(widened))] * bool(widened),
            ("loss scale", str(self.loss_scale or "none")),
            *([("adapters", "as other layers and weights")] if not self.float32_adapters else []),
            *([("model", "unit-scaled: by halfstep.unit_scale, or written so")] if self.unit_scaled else []),
            *([("gated MLPs", SMOOTH_GLU[self.smooth_glu])] if self.smooth_glu else []),
            *([("codes", str(self.codes))] if self.codes else []),
            *([("saved", str(self.saved))] if self.saved else []),
            *([("across ranks", str(self.communication))] if self.communication else []),
            *self._kept(),
            *[(f"linear {rule.where!r}", linear_text(rule.linear)) for rule in self.rules if rule.linear.rounds],
            *self._attention(),
            *[(f"from {stage.when}", f"{stage.recipe.name}: {stage.recipe.passes_text()}") for stage in self.stages],
            *([("projection", str(self.projection))] if self.projection else []),
            ("batch", self.batch_text),
            ("bytes/param", f"{self.bytes_per_parameter()}, with Adam"),
            ("source", self.source),
            *[("note", note) for note in self.notes],
        ]
        body = "\n".join(
            textwrap.fill(text, 105, initial_indent=f"  {label:<12} ", subsequent_indent=" " * 15)
            for label, text in lines
        )
        title = f"{self.name} ({', '.join(self.aliases)})" if self.aliases else self.name
        return f"{title}\n{textwrap.fill(self.summary, 100, initial_indent='  ', subsequent_indent='  ')}\n{body}"
