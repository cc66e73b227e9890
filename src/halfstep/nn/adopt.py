"""`adopt` and `extend`: give a module a subclass of its own class, with another forward or other methods.

And `Applied`, the record that `apply` leaves on the model's root, for its forward, for `advance` and for `revert`.
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
"""members(stock class) -> the attributes of the subclass, by name. Hashable, and pickled with the module: a function or
a frozen dataclass at a module's top level."""


_MADE, _OWN, _FORWARD = "_halfstep_made", "_halfstep_own", "_halfstep_forward"


@dataclass(frozen=True)
class _Made:
    """How a subclass was made, stored as its attribute `_MADE`."""

    stock: type[nn.Module]
    members: Members
    is_beneath: bool
    """Whether `release` keeps it by default."""


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
        forward: a function at a module's top level.
        on_copy: called with every copy of the module, unpickled ones too, for what torch does not copy.
        patchable: a forward that is set on the instance, before or later, is called through `forward` too.
        beneath: `release` keeps it: it belongs to unit scaling, on top of which recipes are applied.
    """
    extend(module, _Calling(forward, on_copy, patchable, beneath))


def extend(module: nn.Module, members: Members) -> None:
    """Give `module` a subclass of its own class with these members. Equal pairs of class and members share one."""
    module.__class__ = _subclass(type(module), members)  # type: ignore[arg-type]


def _layers(kind: type[nn.Module]) -> Iterator[_Made]:
    """The `_Made` records of a class and of the made classes beneath it, last to first; none for a stock class."""
    while (made := kind.__dict__.get(_MADE)) is not None:
        yield made
        kind = made.stock


def extensions(module: nn.Module) -> tuple[Members, ...]:
    """The members of the subclasses that `release` would remove from the module, first to last."""
    return tuple(made.members for made in takewhile(lambda made: not made.is_beneath, _layers(type(module))))[::-1]


def release(module: nn.Module, beneath: bool = False) -> None:
    """Give `module` back the class that it had before every `adopt` and `extend`.

    Args:
        beneath: also undo those that were made with `beneath=True`.
    """
    for made in takewhile(lambda made: beneath or not made.is_beneath, _layers(type(module))):
        module.__class__ = made.stock


# ---- stock classes and their forwards --------------------------------------------------------------------------------


def beneath(module: nn.Module) -> type[nn.Module]:
    """The module's class without the subclasses of unit scaling on top of it."""
    kind = type(module)
    for made in takewhile(lambda made: made.is_beneath, _layers(kind)):
        kind = made.stock
    return kind


def forward_owner(module: nn.Module) -> str:
    """The full name of the class that defines the module's forward, such as `torch.nn.modules.linear.Linear`, ignoring
    unit scaling's; empty if the instance has a forward of its own. A name, so that asking imports no library."""
    if "forward" in vars(module):
        return ""
    kind = type(module)
    return owner_of(beneath(module) if _MADE in vars(kind) else kind)


def owner_of(kind: type | str) -> str:
    """The full name of the class that defines a class's forward; a string is returned as it is."""
    if isinstance(kind, str):
        return kind
    for base in kind.__mro__:
        if "forward" in vars(base):
            return f"{base.__module__}.{base.__qualname__}"
    raise TypeError(f"{kind} has no forward")


def has_forward_of(module: Any, kinds: Iterable[type | str]) -> bool:
    """Whether the module's forward is that of one of these classes, not overridden by a subclass or a patch."""
    return forward_owner(module) in map(owner_of, kinds)


def is_stock(module: nn.Module) -> bool:
    """Whether the module's class has no subclass of unit scaling on top."""
    return beneath(module) is type(module)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before every `adopt` and `extend`."""
    return next((made.stock for made in reversed([*_layers(type(module))])), type(module))


def twin(module: nn.Module, kind: type[nn.Module], **others: Any) -> nn.Module:
    """A new module of class `kind` that shares the attributes of `module`, except for `others`: for one forward."""
    made = object.__new__(kind)
    made.__dict__.update({**vars(module), **others})
    return made


def is_covered(module: nn.Module) -> bool:
    """Whether an adopted module has a foreign subclass on top, which hides ours from `release`."""
    return _MADE not in vars(type(module)) and any(_MADE in vars(kind) for kind in type(module).__mro__)


# ---- members of a subclass -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Calling:
    """Members: a `forward` that calls `self.forward(stock forward, module, ...)`."""

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
    """Members: a property `name` with the value `value(module, name)`, a function at a module's top level."""

    name: str
    value: Callable[..., Any]

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        return {self.name: property(partial(self.value, name=self.name))}


@dataclass(frozen=True)
class InTurn:
    """Members: methods that dispatch on the module's stage, to those of the stock class extended by `stages[stage]`.

    One class serves all stages, since others may subclass it (fully_shard), and a traced graph guards on it.
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
    """A method that calls the method `name` of the class of the module's stage."""
    methods = tuple(getattr(kind, name) for kind in kinds)

    @wraps(getattr(stock, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return methods[part_of(self).stage](self, *args, **kwargs)

    return method


class _Patchable:
    """The `forward` of an adopted class whose instances may have a forward of their own, called through `around` too.

    A data descriptor: it takes precedence over the instance's `__dict__`.
    """

    def __init__(self, adopted: Forward, around: Forward) -> None:
        self._adopted = adopted
        self._around = around

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self._adopted
        own, around = module.__dict__.get("forward"), self._around
        if own is None:
            return getattr(module, _FORWARD)  # an ordinary bound method, which Dynamo can rebuild

        def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(lambda _module, *args, **kwargs: own(*args, **kwargs), self, *args, **kwargs)

        if not torch.compiler.is_compiling():  # not needed in a traced call, and Dynamo traces no `update_wrapper`
            update_wrapper(patched, own)
            vars(patched)[_OWN] = own
        return MethodType(patched, module)

    def __set__(self, module: Any, forward: Any) -> None:
        # Code that saves and restores `forward` (Lightning under DDP, each step) assigns our wrapper: unwrap it.
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
    # Cached, so that modules of one class still share a class (torch.compile guards on it).
    identity = {
        _MADE: _Made(stock, members, getattr(members, "beneath", False)),
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": _reduce_ex,
    }
    return _derived(stock, {**identity, **members(stock)})


class _Plain(nn.Module):
    """A temporary base that `_derived` creates a class with, before it sets the real one."""


def _derived(stock: type[nn.Module], namespace: dict[str, Any]) -> type[nn.Module]:
    """A subclass of `stock`, made without calling its `__init_subclass__` or metaclass: registries and checks of
    subclasses are meant for those that people write."""
    meta = type(stock)
    create = abc.ABCMeta if issubclass(meta, abc.ABCMeta) else type
    made: type[nn.Module] = create.__new__(meta, stock.__name__, (_Plain,), namespace)
    try:
        made.__bases__ = (stock,)
    except TypeError:  # incompatible layout (__slots__)
        made = type(stock.__name__, (stock,), namespace)
    return made


def _wrapped(stock: type[nn.Module], forward: Forward) -> Forward:
    """`forward`, wrapped as a base class of `stock` wraps the forward of each subclass, if it does so. Only the
    outermost such wrapper acts. transformers' GradientCheckpointingLayer is such a base."""
    wrapper: Any = stock.forward
    if not any(_cell_contents(cell) is wrapper for cell in getattr(wrapper, "__closure__", None) or ()):
        return forward
    made = _derived(stock, {"forward": forward})
    super(made, made).__init_subclass__()
    return made.forward


def _cell_contents(cell: CellType) -> Any:
    """The contents of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    """Reduce as the stock class does, with the extensions as arguments: a pickle cannot name a made class."""
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
    """The recipe that a model follows, and the dtypes to revert to."""

    recipe: Recipe
    autocast: torch.dtype | None
    dtypes: dict[str, torch.dtype]
    """The original dtype of each parameter that is now stored in the recipe's dtype, by name."""
    grads: torch.dtype
    """The dtype in which their gradients accumulate."""
    clock: Clock | None
    """Counts steps, if scales or the stage of the recipe depend on earlier steps."""
    plan: Plan
    """The changes to the model, as `plan_of` returns them."""
    rounded: tuple[str, ...] = ()
    """The names of the parameters that matmuls round."""
    adapters: dict[str, torch.dtype] = field(default_factory=dict)
    """The original dtype of each adapter parameter, now float32, by name."""
    quantized: bool = False
    """Whether the model is quantized for inference (`nn.quantize_model`)."""
    adapts: bool = False
    """Whether a quantized model trains adapters beside its codes."""
    schedule: Schedule | None = None
    """Which stage of the recipe is in force, if it has several."""

    @property
    def stage(self) -> Recipe:
        """The recipe of the stage in force."""
        return self.recipe if self.schedule is None else self.recipe.by_stage[self.schedule.stage]


def applied_to(model: nn.Module) -> Applied:
    """The `Applied` record of a model.

    Raises:
        RecipeError: the model follows no recipe.
    """
    applied: Applied | None = part_of(model).applied
    if applied is None:
        raise RecipeError(
            f"this {type(model).__name__} follows no recipe; call halfstep.apply or halfstep.prepare on it first"
        )
    return applied
