"""What a parameter is to its model, what unit scaling made of a module, and how an optimizer follows a gradient.

A parameter's role decides its scale at initialisation and its learning rate. What unit scaling made is one record, an
attribute of the module. How an optimizer follows a gradient is for learning-rate rules; weight decay may be held apart
from the learning rate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError, OptimizerError, one_of, unknown
from halfstep.recipe import LinearSpec
from halfstep.text import some


# ---- records of modules ----------------------------------------------------------------------------------------------

_NAME = "_halfstep_unit"


@dataclass(frozen=True)
class UnitPart:
    """A module's part of a unit-scaled model. Copies and pickles of the module carry it along."""

    multipliers: LinearSpec | None = None
    """What the products of a layer are multiplied by."""
    forward: Any = None
    """What its forward computes by: of one operation a `Whole`, of code of its own an `Own` (`nn.unit`)."""
    scaled: Any = None
    """Of a model that `unit_scale` was called on: its report, and what weights were divided by."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """What it says of its parameters, by name (`unit.roles`)."""
    depth: int | Callable[[Any], int] | None = None
    """How many blocks it has, as a residual stack."""
    readout: str | None = None
    """Of a readout: the constraint that it names."""


NONE, _PLAIN = UnitPart(), LinearSpec()


def unit_part(module: Any) -> UnitPart:
    """The module's record; an empty one where there is none."""
    return module.__dict__.get(_NAME, NONE)  # type: ignore[no-any-return]


def multipliers_of(module: Any) -> LinearSpec:
    """What the products of a layer that is unit-scaled are multiplied by; an empty spec of another."""
    return module.__dict__.get(_NAME, NONE).multipliers or _PLAIN


def set_unit_part(module: Any, **changes: Any) -> None:
    """Put those fields in the module's record; one in which nothing is left is taken away."""
    module.__dict__[_NAME] = changed = replace(unit_part(module), **changes)
    if changed == NONE:
        del module.__dict__[_NAME]


# ---- roles of parameters ---------------------------------------------------------------------------------------------

KINDS = {
    "embedding": "a table of rows that are looked up",
    "input": "the matrix of a layer that takes the data, whose size does not grow with the model",
    "hidden": "a matrix between two layers of the model",
    "readout": "the matrix of the last layer, whose outputs do not grow in number with the model",
    "norm": "the gain of a norm",
    "bias": "what is added",
}
"""The roles of weights, and what each stands for."""
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_BIASED = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class Tag:
    """What a module says of one of its parameters.

    Raises:
        ModelError: a kind that is not one of `KINDS`.
    """

    kind: str
    ends_branch: bool = False
    """Whether it is the matrix of the last layer of a residual branch: attention's output, an MLP's down-projection."""

    def __post_init__(self) -> None:
        one_of("role of a parameter", self.kind, KINDS, ModelError)


@dataclass(frozen=True)
class Role:
    """One parameter: its kind, what one output sums over, how many outputs there are, and the depth it stands in."""

    kind: str
    fan_in: int
    """The rows of an embedding's table; of a gain or a bias, its elements."""
    fan_out: int
    depth: int | None = None
    """How many blocks the residual stack has that it is part of; None outside of one."""
    ends_branch: bool = False


def tag_of(module: nn.Module, name: str = "weight") -> Tag | None:
    """What the module says of its parameter of that name; or what its class alone tells (an embedding's table, a
    norm's gain, a linear or convolutional layer's bias); None where nothing tells."""
    tags: Mapping[str, Tag] = unit_part(module).tags
    if name in tags:
        return tags[name]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Tag("embedding")
    if isinstance(module, _NORMS) or (isinstance(module, _BIASED) and name == "bias"):
        return Tag("bias" if name == "bias" else "norm")
    return None


def set_tag(module: nn.Module, name: str, tag: Tag) -> None:
    """Say what a module's own parameter of that name is. It is kept by the module, and so by its copies and pickles: a
    parameter loses its attributes when it is copied."""
    set_unit_part(module, tags={**unit_part(module).tags, name: tag})


def set_roles(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Say what parameters are: globs on their names, and kinds (`KINDS`); the first glob that matches decides.

    For layers that are not `halfstep.unit`'s, and for those that stand elsewhere than their class says.

    Raises:
        ModelError: a kind that there is not, or a glob that no parameter matches; nothing was set.

    >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    >>> set_roles(model, {"0.weight": "input", "2.weight": "readout"})
    >>> roles(model)["2.weight"]
    Role(kind='readout', fan_in=64, fan_out=2, depth=None, ends_branch=False)
    """
    tags = {glob: Tag(kind) for glob, kind in kinds.items()}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for glob in tags:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ModelError(unknown("parameter", glob, names) + ": a glob of set_roles must match one")
    for name in names:
        tag = next((tag for glob, tag in tags.items() if fnmatchcase(name, glob)), None)
        if tag is not None:
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            before = tag_of(module, own)
            set_tag(module, own, Tag(tag.kind, before is not None and before.ends_branch and tag.kind == "hidden"))


def set_depth(stack: nn.Module, depth: int) -> None:
    """Say that a module is a residual stack of so many blocks: a list or a sequence that is not `unit.Stack`.

    Raises:
        ModelError: a depth below 1.
    """
    if depth < 1:
        raise ModelError(f"depth = {depth} given; expected the number of the stack's blocks, at least 1")
    set_unit_part(stack, depth=depth)


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter, by name; a tied one stands there by each of its names.

    Raises:
        ModelError: parameters whose role nothing tells, by name; or one residual stack within another.
    """
    found, missing = known_roles(model)
    if missing:
        raise ModelError(no_role(missing))
    return found


def known_roles(model: nn.Module) -> tuple[dict[str, Role], list[str]]:
    """`roles`, as far as they can be told, and the names of the others."""
    found: dict[str, Role] = {}
    missing: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name, tag = f"{path}.{own}" if path else own, tag_of(module, own)
            if tag is None:
                missing.append(name)
            else:
                found[name] = Role(tag.kind, *_fans(module, parameter, tag.kind), _depth(model, path), tag.ends_branch)
    return found, missing


def no_role(names: list[str]) -> str:
    """The message for parameters whose role nothing tells."""
    return (
        f"no role is known of {some(names, 8)}. Say it: halfstep.unit.set_roles(model, "
        f"{{{names[0]!r}: 'hidden'}}); globs are taken, and the roles are {', '.join(KINDS)}. The layers of "
        "halfstep.unit bring theirs"
    )


def _fans(module: Any, parameter: Tensor, kind: str) -> tuple[int, int]:
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return parameter.numel(), parameter.numel()
    if kind == "embedding":
        return shape[0], prod(shape[1:])
    window = prod(shape[2:])
    if getattr(module, "transposed", False) or type(module).__name__ == "Conv1D":  # the first dimension is the input's
        groups = getattr(module, "groups", 1)
        return shape[0] // groups * window, shape[1] * groups
    return shape[1] * window, shape[0]


def _depth(model: nn.Module, path: str) -> int | None:
    parts = path.split(".") if path else []
    modules = {at: model.get_submodule(at) for at in (".".join(parts[:n]) for n in range(len(parts) + 1))}
    said = {at: unit_part(module).depth for at, module in modules.items()}
    depths = {at: n(modules[at]) if callable(n) else n for at, n in said.items() if n is not None}
    if len(depths) > 1:
        outer, inner = list(depths)[:2]
        raise ModelError(
            f"{inner} is a residual stack within {outer or 'the model'}, which is one too, and the rule for depth "
            "takes one: make the inner one an nn.Sequential, and give the outer one all blocks (unit.Stack(depth=...))"
        )
    return next(iter(depths.values()), None)


# ---- optimizers and weight decay -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerKind:
    """How an optimizer's step follows a gradient.

    `adam`: the step stays when all gradients are multiplied by one constant; `sgd`: it is multiplied too.
    """

    rule: str
    decoupled: bool
    """Whether weight decay multiplies the weight by 1 - lr decay, instead of being added to the gradient."""


_KNOWN = {
    **dict.fromkeys((
        "adamw", "lion", "lamb", "adafactor", "adamw8bit", "adamw4bit", "adamwfp8", "pagedadamw", "pagedadamw8bit",
        "pagedadamw32bit", "adamw32bit", "lion8bit", "lion32bit", "pagedlion", "pagedlion8bit", "lamb8bit", "lamb32bit",
        "fusedlamb", "ademamix", "ademamix8bit", "deepspeedcpulion", "adamwschedulefree",
    ), OptimizerKind("adam", True)),
    **dict.fromkeys((
        "adam", "adamax", "nadam", "radam", "adagrad", "rmsprop", "adam8bit", "adam32bit", "pagedadam", "sparseadam",
    ), OptimizerKind("adam", False)),
    "sgd": OptimizerKind("sgd", True),  # without momentum its decay multiplies the weight by 1 - lr decay
}  # fmt: skip


def optimizer_kind(optimizer: type[torch.optim.Optimizer] | str) -> OptimizerKind:
    """How that class, or the optimizer of that name, follows a gradient. A subclass of a known class is of its kind.

    Raises:
        OptimizerError: neither is known; an instance is no class.
    """
    if isinstance(optimizer, str):
        names = [optimizer]
    elif isinstance(optimizer, type):
        names = [base.__name__ for base in optimizer.__mro__]
    else:
        raise OptimizerError(
            f"an instance of {type(optimizer).__name__} found; expected its class: the groups come first, then "
            f"{type(optimizer).__name__}(halfstep.unit.parameter_groups(model, {type(optimizer).__name__}, lr=...))"
        )
    for name in names:
        if (kind := _KNOWN.get(name.lower())) is not None:
            return kind
    raise OptimizerError(
        f"{unknown('optimizer', names[0], _KNOWN)}. The learning-rate rules depend on how it follows a gradient: give "
        "optimizer='adamw' if its step stays when the gradient is multiplied by a constant and its decay multiplies "
        "the weight by 1 - lr decay; 'adam' if that decay is added to the gradient; 'sgd' if the step is multiplied too"
    )


def decouple_decay(optimizer: torch.optim.Optimizer) -> None:
    """Hold, from step to step, the decay of the groups that `parameter_groups(decay="decoupled")` made.

    torch's optimizers, and halfstep's, multiply a weight by 1 - lr * weight_decay. Before each step this sets
    weight_decay to decay_per_step / lr, with the learning rate that the scheduler has left there. Call it once, on the
    optimizer that steps: after `halfstep.prepare`, on what came back; after a copy or a pickle of the optimizer, which
    torch makes without hooks, again. A step with a learning rate of zero moves nothing, and decays nothing.

    Raises:
        OptimizerError: no group has a `decay_per_step`; or one has momentum, which spreads what SGD adds to the
            gradient over the steps that follow.

    Source: Narayan et al. 2025, arXiv 2502.05967 (fully decoupled decay).
    """
    groups = [group for group in optimizer.param_groups if "decay_per_step" in group]
    if not groups:
        raise OptimizerError(
            "no group of this optimizer has decay_per_step: make them by "
            "halfstep.unit.parameter_groups(model, ..., decay='decoupled')"
        )
    if any(group.get("momentum") and group["decay_per_step"] for group in groups):
        raise OptimizerError(
            "SGD with momentum adds decay to the gradient, and so spreads it over later steps: decay per step wants "
            "momentum=0, or AdamW, Lion"
        )
    _set(optimizer)
    optimizer.register_step_pre_hook(_set)


def _set(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        if "decay_per_step" in group and rate:
            group["weight_decay"] = group["decay_per_step"] / rate
