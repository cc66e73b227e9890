"""What a parameter is to its model: its role, which decides its scale at initialisation and its learning rate."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import Tensor, nn

from halfstep.errors import ModelError, one_of, unknown
from halfstep.unit.part import set_unit_part, unit_part


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
            ends = before is not None and before.ends_branch and tag.kind == "hidden"
            set_tag(module, own, Tag(tag.kind, ends))


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
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, tag = f"{path}.{own}" if path else own, tag_of(module, own)
            if tag is None:
                missing.append(name)
                continue
            fan_in, fan_out = _fans(module, parameter, tag.kind)
            found[name] = Role(tag.kind, fan_in, fan_out, _depth(model, path), tag.ends_branch)
    return found, missing


def no_role(names: list[str]) -> str:
    """The message for parameters whose role nothing tells."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (
        f"no role is known of {', '.join(names[:8])}{more}. Say it: halfstep.unit.set_roles(model, "
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


def _own_depth(module: nn.Module) -> int | None:
    depth = unit_part(module).depth
    return depth(module) if callable(depth) else depth


def _depth(model: nn.Module, path: str) -> int | None:
    parts = path.split(".") if path else []
    stacks = [".".join(parts[:n]) for n in range(len(parts) + 1)]
    depths = {at: depth for at in stacks if (depth := _own_depth(model.get_submodule(at))) is not None}
    if len(depths) > 1:
        outer, inner = list(depths)[:2]
        raise ModelError(
            f"{inner} is a residual stack within {outer or 'the model'}, which is one too, and the rule for depth "
            "takes one: make the inner one an nn.Sequential, and give the outer one all blocks (unit.Stack(depth=...))"
        )
    return next(iter(depths.values()), None)
