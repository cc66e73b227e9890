"""`Role`s of parameters, which decide their initial scale and learning rate; and `UnitPart`, a module's record.

Also `optimizer_kind`, which learning-rate rules depend on, and `decouple_decay`, weight decay independent of the
learning rate.
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
    """The record of a module in a unit-scaled model. Copied and pickled with the module."""

    multipliers: LinearSpec | None = None
    """The multipliers of a layer's matmuls."""
    forward: Any = None
    """The factors of its forward: a `Whole` if the module is one operation, else an `Own` (`nn.unit`)."""
    scaled: Any = None
    """Only on a model that `unit_scale` was called on: the record to undo it."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """The `Tag`s of its parameters, by name."""
    depth: int | Callable[[Any], int] | None = None
    """For a residual stack: its number of blocks, or a function of the module that returns it."""
    readout: str | None = None
    """For a readout: the name of its constraint."""


NONE, _PLAIN = UnitPart(), LinearSpec()


def unit_part(module: Any) -> UnitPart:
    """The module's record; an empty one if it has none."""
    return module.__dict__.get(_NAME, NONE)  # type: ignore[no-any-return]


def multipliers_of(module: Any) -> LinearSpec:
    """The multipliers of a unit-scaled layer's matmuls; an empty spec for other layers."""
    return module.__dict__.get(_NAME, NONE).multipliers or _PLAIN


def set_unit_part(module: Any, **changes: Any) -> None:
    """Set fields of the module's record; a record without any set field is removed."""
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
"""The kinds of roles, with their meaning."""
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_BIASED = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class Tag:
    """The role that a module assigns to one of its parameters.

    Raises:
        ModelError: the kind is not one of `KINDS`.
    """

    kind: str
    ends_branch: bool = False
    """Whether it is the matrix of a residual branch's last layer: attention's output, an MLP's down-projection."""

    def __post_init__(self) -> None:
        one_of("role of a parameter", self.kind, KINDS, ModelError)


@dataclass(frozen=True)
class Role:
    """A parameter's role: its kind, fan-in, fan-out and the depth of its residual stack."""

    kind: str
    fan_in: int
    """For an embedding, the rows of the table; for a gain or bias, its number of elements."""
    fan_out: int
    depth: int | None = None
    """The number of blocks of the residual stack that contains it; None outside of one."""
    ends_branch: bool = False


def tag_of(module: nn.Module, name: str = "weight") -> Tag | None:
    """The tag of the module's parameter `name`: one that was set, or one that follows from the module's class (an
    embedding's table, a norm's gain, the bias of a linear or convolutional layer); else None."""
    tags: Mapping[str, Tag] = unit_part(module).tags
    if name in tags:
        return tags[name]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Tag("embedding")
    if isinstance(module, _NORMS) or (isinstance(module, _BIASED) and name == "bias"):
        return Tag("bias" if name == "bias" else "norm")
    return None


def set_tag(module: nn.Module, name: str, tag: Tag) -> None:
    """Set the tag of a module's own parameter. It is stored on the module, so that copies and pickles have it: a
    parameter loses its attributes when it is copied."""
    set_unit_part(module, tags={**unit_part(module).tags, name: tag})


def set_roles(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Set the roles of parameters: globs on their names, with kinds (`KINDS`); the first glob that matches decides.

    For layers other than `halfstep.unit`'s, and for those whose role differs from their class's default.

    Raises:
        ModelError: an unknown kind, or a glob that no parameter matches; nothing was set.

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
    """Declare a module to be a residual stack of `depth` blocks, for a list or sequence other than `unit.Stack`.

    Raises:
        ModelError: a depth below 1.
    """
    if depth < 1:
        raise ModelError(f"depth = {depth} given; expected the number of the stack's blocks, at least 1")
    set_unit_part(stack, depth=depth)


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter, by name; a tied one under each of its names.

    Raises:
        ModelError: parameters of unknown roles; or a residual stack within another.
    """
    found, missing = known_roles(model)
    if missing:
        raise ModelError(no_role(missing))
    return found


def known_roles(model: nn.Module) -> tuple[dict[str, Role], list[str]]:
    """The known roles, by parameter name, and the names of parameters of unknown roles."""
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
    """The error message for parameters of unknown roles."""
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
    """How an optimizer's step depends on the gradient's scale and on weight decay.

    `adam`: the step does not change if all gradients are multiplied by a constant; `sgd`: it is multiplied too.
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
    """The kind of an optimizer, by class or name. A subclass of a known class has its kind.

    Raises:
        OptimizerError: the optimizer is unknown, or an instance.
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
    """Keep the weight decay per step constant for groups made by `parameter_groups(decay="decoupled")`.

    torch's optimizers, and halfstep's, multiply a weight by 1 - lr * weight_decay. A hook sets weight_decay to
    decay_per_step / lr before each step, with the group's current learning rate. Call it once, on the optimizer that
    steps: after `halfstep.prepare`, on the returned one; again after a copy or pickle of the optimizer, which torch
    makes without hooks. A step with a learning rate of zero changes and decays nothing.

    Raises:
        OptimizerError: no group has a `decay_per_step`; or one has momentum, which spreads SGD's decay over later
            steps.

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
