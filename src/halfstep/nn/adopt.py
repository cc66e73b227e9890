"""Give a module another forward, or other methods, without making it another module; what `apply` leaves on a model.

This is kept on the model's root, for its forward, for `advance` and for `revert`.
"""

import abc
import copyreg
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial, reduce, update_wrapper, wraps
from itertools import takewhile
from types import CellType, MethodType
from typing import Any

import torch
from torch import nn

from halfstep.errors import RecipeError
from halfstep.nn.plan import Plan
from halfstep.nn.schedule import Clock, Schedule
from halfstep.ops.part import part_of
from halfstep.recipe import Recipe


# ---- adopting and releasing a module ---------------------------------------------------------------------------------

Forward = Callable[..., Any]
"""forward(stock_forward, module, *args, **kwargs) -> what the module returns"""
OnCopy = Callable[[nn.Module], None]
Members = Callable[[type[nn.Module]], dict[str, Any]]
"""members(stock class) -> what the subclass has in the place of the stock class's own. Hashable, and pickled with the
module: a function or a frozen dataclass of a module's top level."""


_MADE, _OWN, _FORWARD = "_halfstep_made", "_halfstep_own", "_halfstep_forward"


@dataclass(frozen=True)
class _Made:
    """How a class was made, at its attribute `_MADE`."""

    stock: type[nn.Module]
    members: Members
    is_beneath: bool
    """Whether `release` leaves it."""


def adopt(
    module: nn.Module,
    forward: Forward,
    on_copy: OnCopy | None = None,
    patchable: bool = False,
    beneath: bool = False,
) -> None:
    """Make `module` call `forward`, by giving it a subclass of its own class.

    Parameters, names, ties, hooks, state-dict keys and `isinstance` keep their identity; the class keeps its name,
    which Hugging Face writes into config.json, and `forward` its signature. `release` undoes it exactly. Copies and
    pickles of the module are adopted too, and pickles name the stock class alone.

    Args:
        forward: a function of a module's top level.
        on_copy: called with every copy of the module, unpickled ones too, for what torch does not copy.
        patchable: a forward that is set on the instance, before or later, is called through `forward` too.
        beneath: `release` leaves it: it is what a recipe is laid upon (unit scaling).
    """
    extend(module, _Calling(forward, on_copy, patchable, beneath))


def extend(module: nn.Module, members: Members) -> None:
    """Give `module` a subclass of its own class with those members; one subclass for each pair of the two."""
    module.__class__ = _subclass(type(module), members)  # type: ignore[arg-type]


def _layers(kind: type[nn.Module]) -> Iterator[_Made]:
    """How a class was made, and those that it was made of, last to first; nothing of a stock class."""
    while (made := kind.__dict__.get(_MADE)) is not None:
        yield made
        kind = made.stock


def extensions(module: nn.Module) -> tuple[Members, ...]:
    """What `release` would take away from the module, first to last."""
    return tuple(made.members for made in takewhile(lambda made: not made.is_beneath, _layers(type(module))))[::-1]


def release(module: nn.Module, beneath: bool = False) -> None:
    """Give `module` back the class it had before every `adopt` and `extend`; those that lie beneath stay, unless asked
    for too."""
    for made in takewhile(lambda made: beneath or not made.is_beneath, _layers(type(module))):
        module.__class__ = made.stock


# ---- stock classes and their forwards --------------------------------------------------------------------------------


def beneath(module: nn.Module) -> type[nn.Module]:
    """The module's class without what unit scaling put over it: its forward is the class's own, or a
    recipe's."""
    kind = type(module)
    for made in takewhile(lambda made: made.is_beneath, _layers(kind)):
        kind = made.stock
    return kind


def forward_owner(module: nn.Module) -> str:
    """The class whose forward the module calls, `torch.nn.modules.linear.Linear`, beneath unit scaling's; empty where
    the instance has a forward of its own. A name, so that a library need not be imported to ask for its classes."""
    if "forward" in vars(module):
        return ""
    kind = type(module)
    return owner_of(beneath(module) if _MADE in vars(kind) else kind)


def owner_of(kind: type | str) -> str:
    """The class that a class has its forward from, by full name; a string is that already."""
    if isinstance(kind, str):
        return kind
    for base in kind.__mro__:
        if "forward" in vars(base):
            return f"{base.__module__}.{base.__qualname__}"
    raise TypeError(f"{kind} has no forward")


def has_forward_of(module: Any, kinds: Iterable[type | str]) -> bool:
    """Whether the module calls the forward of one of these classes: not where a subclass or a patch has another."""
    return forward_owner(module) in map(owner_of, kinds)


def is_stock(module: nn.Module) -> bool:
    """Whether unit scaling put nothing over the module's class."""
    return beneath(module) is type(module)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before every `adopt` and `extend`."""
    return next((made.stock for made in reversed([*_layers(type(module))])), type(module))


def twin(module: nn.Module, kind: type[nn.Module], **others: Any) -> nn.Module:
    """A module of that class that has what `module` has, but for those attributes: for one call of a forward."""
    made = object.__new__(kind)
    made.__dict__.update({**vars(module), **others})
    return made


def is_covered(module: nn.Module) -> bool:
    """Whether an adopted module was given another class on top, which hides ours from `release`."""
    return _MADE not in vars(type(module)) and any(_MADE in vars(kind) for kind in type(module).__mro__)


# ---- members of a subclass -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Calling:
    """The members of a class whose forward is called through another."""

    forward: Forward
    on_copy: OnCopy | None
    patchable: bool
    beneath: bool

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        forward, on_copy, stock_forward = self.forward, self.on_copy, stock.forward

        @wraps(stock_forward)
        def calling(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(stock_forward, self, *args, **kwargs)

        adopted = _wrapped(stock, calling)
        members: dict[str, Any] = {"forward": adopted}
        if self.patchable:
            members = {"forward": _Patchable(adopted, forward), _FORWARD: adopted}
        if on_copy is None:
            return members

        def __setstate__(self: nn.Module, state: dict[str, Any]) -> None:
            stock.__setstate__(self, state)  # type: ignore[no-untyped-call]
            on_copy(self)

        return {**members, "__setstate__": __setstate__}


@dataclass(frozen=True)
class Shown:
    """The members that show an attribute of that name, as `value(module, name)`, a function of a module's top level."""

    name: str
    value: Callable[..., Any]

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        return {self.name: property(partial(self.value, name=self.name))}


@dataclass(frozen=True)
class InTurn:
    """The members of a class that is, by its module's stage, one of several: each extended as `stages` says.

    One class for all stages, since others may have put theirs on top (fully_shard), and a traced graph guards on it.
    """

    stages: tuple[tuple[Members, ...], ...]

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        kinds: list[Any] = [reduce(_subclass, members, stock) for members in self.stages]  # type: ignore[arg-type]
        names = {
            name: None
            for kind in kinds
            for made in kind.__mro__[: kind.__mro__.index(stock)]
            if (record := vars(made)[_MADE])
            for name in record.members(record.stock)
        }
        made = {name: _in_turn(name, stock, kinds) for name in names}
        if "forward" in made:
            made["forward"] = _wrapped(stock, made["forward"])
        return made


def _in_turn(name: str, stock: type[nn.Module], kinds: list[type[nn.Module]]) -> Callable[..., Any]:
    """The method of that name that the module's stage has."""
    methods = tuple(getattr(kind, name) for kind in kinds)

    @wraps(getattr(stock, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return methods[part_of(self).stage](self, *args, **kwargs)

    return method


class _Patchable:
    """`forward` of an adopted class, where instances may have one of their own: that goes through the adoption too.

    A descriptor that takes assignments stands before the instance's own attributes, whatever put them there.
    """

    def __init__(self, adopted: Forward, around: Forward) -> None:
        self._adopted = adopted
        self._around = around

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self._adopted
        own, around = module.__dict__.get("forward"), self._around
        if own is None:
            return getattr(module, _FORWARD)  # bound by torch, of which a graph makes the same again

        def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(lambda _module, *args, **kwargs: own(*args, **kwargs), self, *args, **kwargs)

        if not torch.compiler.is_compiling():  # a traced call asks for neither, and Dynamo traces no `update_wrapper`
            update_wrapper(patched, own)
            vars(patched)[_OWN] = own
        return MethodType(patched, module)

    def __set__(self, module: Any, forward: Any) -> None:
        # Who puts back what they found (Lightning under DDP does, each step) puts back what was inside of it.
        function = getattr(forward, "__func__", None) if getattr(forward, "__self__", None) is module else None
        if function is self._adopted:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = getattr(function, _OWN, forward)

    def __delete__(self, module: Any) -> None:
        if module.__dict__.pop("forward", None) is None:
            raise AttributeError("forward")


# ---- making and copying a subclass -----------------------------------------------------------------------------------


@cache
def _subclass(stock: type[nn.Module], members: Members) -> type[nn.Module]:
    # One class for each pair, so that modules of a kind stay of one kind (torch.compile guards on it).
    identity = {
        _MADE: _Made(stock, members, getattr(members, "beneath", False)),
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": _reduce_ex,
    }
    return _derived(stock, {**identity, **members(stock)})


class _Plain(nn.Module):
    """The base that a subclass is made with, before it gets its own."""


def _derived(stock: type[nn.Module], namespace: dict[str, Any]) -> type[nn.Module]:
    """A subclass of `stock` that is made without its `__init_subclass__` and its metaclass: registries, and whatever
    a class asks of its subclasses, are meant for those that people write."""
    meta = type(stock)
    create = abc.ABCMeta if issubclass(meta, abc.ABCMeta) else type
    made: type[nn.Module] = create.__new__(meta, stock.__name__, (_Plain,), namespace)
    try:
        made.__bases__ = (stock,)
    except TypeError:  # its instances are laid out otherwise (__slots__)
        made = type(stock.__name__, (stock,), namespace)
    return made


def _wrapped(stock: type[nn.Module], forward: Forward) -> Forward:
    """`forward`, in the wrapper that a base of `stock` puts around that of every subclass and that asks whether it is
    the outermost: only that one acts. transformers' GradientCheckpointingLayer is such a base."""
    wrapper: Any = stock.forward
    if not any(_content(cell) is wrapper for cell in getattr(wrapper, "__closure__", None) or ()):
        return forward
    made = _derived(stock, {"forward": forward})
    super(made, made).__init_subclass__()
    return made.forward


def _content(cell: CellType) -> Any:
    """What a closure's cell holds; None where nothing was put there yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    """How the stock class is copied and pickled, with the extensions beside it: no file can name a made class."""
    kind, stock = type(self), stock_class(self)
    extensions = tuple(made.members for made in _layers(kind))[::-1]
    reduced: Any = stock.__reduce_ex__(self, max(int(protocol), 2))
    function, args, *rest = reduced
    if extensions and function is copyreg.__newobj__ and args[0] is kind:  # type: ignore[attr-defined]
        return (_remake, (stock, extensions, *args[1:]), *rest)
    return (function, args, *rest)


def _remake(stock: type[nn.Module], extensions: tuple[Members, ...], *args: Any) -> nn.Module:
    kind: Any = reduce(_subclass, extensions, stock)  # type: ignore[arg-type]
    made: nn.Module = kind.__new__(kind, *args)
    return made


# ---- what `apply` leaves on a model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Applied:
    """The recipe that a model follows, and what it was before."""

    recipe: Recipe
    autocast: torch.dtype | None
    dtypes: dict[str, torch.dtype]
    """The dtype that each parameter had which the recipe stores in its own."""
    grads: torch.dtype
    """The dtype that their gradients accumulate in."""
    clock: Clock | None
    """Where scales, or the stage of the recipe, depend on earlier steps."""
    plan: Plan
    """What was done to the model, for people and programs."""
    rounded: tuple[str, ...] = ()
    """The parameters that products round, by name."""
    adapters: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype that each parameter of an adapter had, which is float32 now."""
    quantized: bool = False
    """Whether the weights are quantised for good (`nn.quantize_model`)."""
    adapts: bool = False
    """Whether a quantised model trains adapters beside its codes."""
    schedule: Schedule | None = None
    """Which stage of the recipe is in force, where it has several."""

    @property
    def stage(self) -> Recipe:
        """The recipe whose arithmetic is in force."""
        return self.recipe if self.schedule is None else self.recipe.by_stage[self.schedule.stage]


def applied_to(model: nn.Module) -> Applied:
    """What `apply` left on the model.

    Raises:
        RecipeError: it follows no recipe.
    """
    applied: Applied | None = part_of(model).applied
    if applied is None:
        raise RecipeError(
            f"this {type(model).__name__} follows no recipe; call halfstep.apply or halfstep.prepare on it first"
        )
    return applied
