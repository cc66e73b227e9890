"""The forwards by which a model follows its recipe: of the root, of parts called from outside, and `following`."""

import copy
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from itertools import takewhile
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx._symbolic_trace import Tracer, is_fx_symbolic_tracing
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from halfstep.errors import ModelError, RecipeError
from halfstep.nn.adopt import Applied, OnCopy, adopt, applied_to
from halfstep.nn.ranks import under_ddp, uneven
from halfstep.nn.schedule import Clock, Recomputation
from halfstep.nn.watched import Copied, nothing
from halfstep.ops.function import LastInput
from halfstep.ops.part import own_part, part_of, parts_of
from halfstep.quant.tracing import inlined, untraced


class Following:
    """The record that all modules of a model share: the context (autocast, clock) of a call that follows the recipe."""

    def __init__(self, model: nn.Module, applied: Applied) -> None:
        self._recipe = applied.recipe.name
        self.agrees = applied.recipe.loss_scale is not None or applied.recipe.keeps_states
        self.own_reduction = applied.recipe.grads is not None
        self._rounds = bool(applied.rounded) or applied.quantized
        leaf = Tracer().is_leaf_module(model, "")  # as a root, torch.fx traces into its code all the same
        self._is_cast = self._rounds or (leaf and applied.autocast is not None)
        self.recomputation = None if applied.schedule is None else Recomputation(applied.schedule)
        self.follow(applied)
        self.calls: dict[int, int] = {}  # by thread: the depth of nested calls
        self._traced = 0  # the same in a traced graph, which has no thread ids
        self._warned = False
        self.last_input = LastInput()
        self._root: Callable[[], nn.Module | None] = weakref.ref(model)

    copied = Copied(lambda: None)
    """The model that this one was copied from, if any."""
    cached: Any = None
    """The rounded weights within `nn.product.cached_weights`, else None."""
    watch: RemovableHandle | None = None
    """The hook on optimizers' first steps (`nn.watched`); copies have none."""
    states: Any = None
    """A cache of the model's scaling states (`nn.scaling`)."""
    drawing: tuple[Applied | None, list[Any]] = None, []
    """A cache of the buffers with noise keys (`nn.stages`), and the record that they were found under."""

    def __getstate__(self) -> dict[str, Any]:
        own = {"_root": nothing, "calls": {}, "_traced": 0}  # a copied part alone has no root; a copied root binds it
        found: dict[str, Any] = {"states": None, "drawing": (None, [])}
        return {**vars(self), **own, **found, "watch": None, "cached": None, "copied": Copied(self._root)}

    def follow(self, applied: Applied) -> None:
        """Take the settings of the stage in force: autocast's dtype, functions to compute in float32, the clock."""
        self._clock: Clock | None = applied.clock
        self._autocast = applied.autocast
        self.functions = applied.stage.float32_functions
        if self.recomputation is not None:
            self.recomputation.begin_stage()

    def bind(self, model: nn.Module) -> None:
        """Set the root, after a copy."""
        self._root = weakref.ref(model)

    def modes(self, module: nn.Module) -> tuple[bool, bool]:
        """(record, evaluates): whether this call trains, so that amaxes are recorded (gradients are on and the root is
        in training mode, whatever the mode of `module`), and whether the root is in evaluation mode."""
        root = self._root()
        training = (module if root is None else root).training
        return training and torch.is_grad_enabled(), not training

    def is_inside(self, module: nn.Module, thread: int) -> bool:
        """Whether a part's call is nested in one that follows the recipe, of the root or of a part around it.

        In a backward pass (activation checkpointing) torch restores autocast, by which such a call is recognized; if
        the recipe has no autocast, it counts as nested unless the part was called from outside before.
        """
        if not thread:
            return self._traced > 0 or self._is_autocast(module)
        if self._is_autocast(module):
            return True
        return torch._C._current_graph_task_id() != -1 and not part_of(module).outside

    def _is_autocast(self, module: nn.Module) -> bool:
        device = device_type_of(module)
        return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == self._autocast

    @contextmanager
    def entered(self, module: nn.Module, thread: int) -> Iterator[None]:
        """The context of a call that follows the recipe; autocast ends with it, also on an exception.

        Raises:
            RecipeError: torch.jit.trace or torch.fx is tracing, and the traced graph would not round.
        """
        self._begin(module, thread)
        try:
            if self._autocast is None:
                yield
            else:
                with torch.autocast(device_type_of(module), dtype=self._autocast):
                    if not self.functions:
                        yield
                    else:
                        with self._widening(thread):
                            yield
        finally:
            self._end(thread)

    def recomputed(self, thread: int) -> AbstractContextManager[Any]:
        """The context of a nested call: `Float32Functions` again if it is recomputed in a backward pass, where torch
        restores autocast but not function modes; else nothing."""
        again = not self.calls.get(thread)  # in a traced graph too: checkpointing there drops function modes
        return self._widening(thread) if again else nullcontext()

    def _widening(self, thread: int) -> "Float32Functions":
        return Float32Functions(self.functions, _part_forward if thread else None)

    @inlined
    def _begin(self, module: nn.Module, thread: int) -> None:
        if not thread:
            self._traced += 1
            return
        jit = self._rounds and torch._C._get_tracing_state() is not None
        if jit or (self._is_cast and is_fx_symbolic_tracing()):
            tracer = "torch.jit.trace" if jit else "torch.fx (symbolic_trace, make_fx)"
            raise RecipeError(
                f"{type(module).__name__} follows recipe {self._recipe!r}, but {tracer} would record a graph without "
                "its rounding. Use torch.compile or torch.export; or trace the plain model, and call halfstep.apply on "
                "the graph (torch.fx)"
            )
        if thread not in self.calls:
            self._tell(Clock.check)
        self.calls[thread] = self.calls.get(thread, 0) + 1

    @inlined
    def _end(self, thread: int) -> None:
        if not thread:
            self._traced -= 1
        elif self.calls[thread] > 1:
            self.calls[thread] -= 1
        else:
            del self.calls[thread]
            self.last_input = LastInput()
            self._tell(Clock.leave)

    @untraced
    def _tell(self, event: Callable[[Clock, nn.Module], None]) -> None:
        root = self._root()
        if self._clock is not None and root is not None and torch.is_grad_enabled():
            event(self._clock, root)

    def leave(self, output: Any, thread: int) -> Any:
        """The output of an outermost call in float32, with hooks by which the clock notices gradients."""
        output = to_float32(output)
        if thread and self._clock is not None and self._clock.listens:
            self._clock.watch_gradients(output)
        return output

    def warn(self, module: nn.Module) -> None:
        """Warn, once a model and if gradients are on, that code between calls of parts does not follow the recipe."""
        root = self._root()
        if self._warned or self._autocast is None or root is None or not _has_forward(root):
            return
        if not torch.is_grad_enabled():  # as transformers' generate calls an encoder
            return
        if {*module.parameters()} >= {*root.parameters()}:  # the root only wraps it
            return
        self._warned = True
        name = next((name for name, part in root.named_modules() if part is module), type(module).__name__)
        warnings.warn(
            f"{type(root).__name__}.{name} is called outside {type(root).__name__}'s forward. It follows recipe "
            f"{self._recipe!r} and returns float32, but functions that your code calls in between do not follow it. "
            "If these include matmuls or attention, put the calls in `with halfstep.following(model): ...`",
            stacklevel=6,  # the code that calls the part
        )


def follow(model: nn.Module, applied: Applied, on_copy: OnCopy, apart: Collection[nn.Module] = ()) -> None:
    """Adopt a model and its parts so that they follow the recipe wherever they are called from.

    Args:
        on_copy: called with copies of the root.
        apart: modules that compute in float32, with all modules inside.
    """
    shared = Following(model, applied)
    own_part(model).applied = applied
    inner = {id(inside) for module in apart for inside in module.modules()}
    enters = applied.autocast is not None or applied.clock is not None
    for module in list(_parts(model)):
        own_part(module).following = shared
        if enters and module is not model and id(module) not in inner:
            adopt(module, _part_forward)
    own_part(model).following = shared
    adopt(model, _root_forward, on_copy, patchable=True)


def added_later(model: nn.Module) -> list[nn.Module]:
    """The parts that were added to the model after `follow`."""
    return [module for module in _parts(model) if part_of(module).following is None]


def root_of(model: nn.Module) -> nn.Module:
    """The module that `apply` was called on, found in `model`, which may wrap it (DDP, torch.compile, PEFT); `model`
    itself if there is none.

    Raises:
        RecipeError: several modules in `model` follow recipes of their own.
    """
    if part_of(model).applied is not None:
        return model
    found = [path for path, _, own in parts_of(model) if own.applied is not None]
    if len(found) > 1:
        raise RecipeError(
            f"{len(found)} parts of this {type(model).__name__} follow a recipe, each its own: {', '.join(found)}; "
            "expected one. Hand over one of them"
        )
    return model.get_submodule(found[0]) if found else model


def following(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which all parts of `model` follow its recipe, and functional calls in between do too.

    For code that calls parts and not the model: `model.decode(model.encode(x))`, a custom training step. Outputs of
    parts keep the dtype that they were computed in; only the model's own outputs are returned in float32.

        with halfstep.following(model):
            y = model.decode(model.encode(x))
        loss = loss_fn(y.float(), target)

    Args:
        model: the model that `apply` or `prepare` was called on, or a wrapper of it.

    Raises:
        RecipeError: the model follows no recipe.
    """
    root = root_of(model)
    applied_to(root)
    return part_of(root).following.entered(root, _thread())  # type: ignore[no-any-return]


@inlined
def _thread() -> int:
    """The id of the current thread; 0 while torch.compile traces."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _root_forward(stock: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    part: Following | None = part_of(model).following
    if part is None:  # someone kept the bound method from before `revert`
        return stock(model, *args, **kwargs)
    thread = _thread()
    if thread and (part.agrees or part.own_reduction):
        wrapped = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if wrapped is not None and part.own_reduction:
            raise under_ddp(applied_to(model).recipe)
        if wrapped is not None and wrapped._join_config.enable:
            raise uneven(applied_to(model).recipe.name)
    recomputation = part.recomputation if thread else None
    if recomputation is not None:
        recomputation.check()
    with part.entered(model, thread):
        output = stock(model, *args, **kwargs)
    output = part.leave(output, thread)
    if recomputation is not None:
        recomputation.mark(output)
    return output


def _part_forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward of a part. Called from outside the root's forward, it enters the recipe's context and returns
    float32, as the root does."""
    part: Following | None = part_of(module).following
    if part is None:
        return stock(module, *args, **kwargs)
    thread = _thread()
    if thread and part.recomputation is not None:
        part.recomputation.check()
    if part.calls.get(thread) or part.is_inside(module, thread):
        if not part.functions:
            return stock(module, *args, **kwargs)
        with part.recomputed(thread):
            return stock(module, *args, **kwargs)
    if thread:
        part_of(module).outside = True
        part.warn(module)
    with part.entered(module, thread):
        output = stock(module, *args, **kwargs)
    return part.leave(output, thread)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that may be called from outside: those with a forward and parameters.

    Modules without parameters (losses, metrics) keep the precision that their caller chose.
    """
    inner = {id(m) for each in model.modules() if isinstance(each, ParametrizationList) for m in each.modules()}
    for module in model.modules():
        own = id(module) not in inner and not isinstance(module, torch.jit.ScriptModule) and _has_forward(module)
        if own and next(module.parameters(), None) is not None:
            yield module


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented" or "forward" in vars(module)


_OPERATORS = {"pow": ("__pow__", "__rpow__", "float_power"), "reciprocal": ("__rtruediv__", "__rdiv__")}
"""Other names under which these functions are called."""


class Float32Functions(TorchFunctionMode):
    """A function mode in which functions and methods of the given names take 16-bit inputs cast to float32.

    As with torch.autocast, calls in place, with `out=` or with a `dtype` are left alone.

    Args:
        part: the forward of parts, which enters this mode again when it is recomputed (activation checkpointing); None
            in a traced graph, which has no call stack to inspect.

    Raises:
        ModelError: such a function is called between parts under reentrant checkpointing, which would recompute it
            without this mode.
    """

    def __init__(self, names: Iterable[str], part: Callable[..., Any] | None) -> None:
        super().__init__()
        self._part = part.__code__ if part is not None and torch.is_grad_enabled() else None
        self.names = frozenset(other for name in names for other in (name, *_OPERATORS.get(name, ())))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        says_where = kwargs.get("dtype") is not None or kwargs.get("out") is not None
        if getattr(func, "__name__", "") in self.names and not says_where:
            if self._part is not None and not torch.is_grad_enabled() and _thread():
                self._check_recomputed(func)
            args, kwargs = tree_map_only(Tensor, _widened, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def _check_recomputed(self, func: Callable[..., Any]) -> None:
        """Raise for a call under torch's reentrant checkpointing, which only the call stack shows."""
        for frame, _ in takewhile(lambda called: called[0].f_code is not self._part, walk_stack(None)):
            if frame.f_code is CheckpointFunction.forward.__code__:
                raise ModelError(
                    f"{func.__name__} is called under torch.utils.checkpoint with use_reentrant=True, by code between "
                    "modules: the recipe computes it in float32, but its recomputation in the backward pass would not "
                    "follow the recipe. Take use_reentrant=False with context_fn=lambda: (nullcontext(), "
                    "halfstep.following(model)), or checkpoint a module that calls it"
                )


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def to_float32(output: Any) -> Any:
    """The output with every 16-bit floating tensor cast to float32, in tuples, named tuples, lists, dicts, dataclasses
    and torch.distributions.

    A loss on it is then computed in float32. Other objects (such as a key-value cache) are returned unchanged.
    """
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, (tuple, list)):
        made = map(to_float32, output)
        return type(output)(*made) if hasattr(output, "_fields") else type(output)(made)
    if isinstance(output, MutableMapping):  # Hugging Face's ModelOutput, a dataclass too, updates its fields itself
        result = copy.copy(output)
        for key, value in output.items():
            result[key] = to_float32(value)
        return result
    if isinstance(output, Mapping):
        return type(output)({key: to_float32(value) for key, value in output.items()})  # type: ignore[call-arg]
    names: list[str] = []
    if is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in fields(output)]
    elif isinstance(output, Distribution):  # its attributes are tensors and other distributions
        names = [*vars(output)]
    widened = copy.copy(output) if names else output
    for name in names:
        object.__setattr__(widened, name, to_float32(getattr(output, name)))
    return widened


def device_type_of(module: nn.Module) -> str:
    """The device type of the module's first parameter, or of its first buffer if it has none."""
    for held in ("_parameters", "_buffers"):
        waiting = [module]
        while waiting:  # module.parameters() builds names too, which takes longer than a layer
            inner = waiting.pop()
            for tensor in getattr(inner, held).values():
                if tensor is not None:
                    return str(tensor.device.type)
            waiting += [child for child in reversed(inner._modules.values()) if child is not None]
    raise ModelError(f"{type(module).__name__} has neither parameters nor buffers, and so no device")
