"""Warnings about optimizers that do not know a model's recipe, and about averages of weights kept in 16 bits."""

import gc
import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from halfstep.ops import CodeTensor, values_of
from halfstep.ops.part import part_of
from halfstep.quant.tracing import untraced
from halfstep.recipe import Recipe


def watch(model: nn.Module, recipe: Recipe) -> None:
    """Register a hook that warns, once, if an optimizer steps on the model that `optimize` was not called on, and that
    starts the search for averages of 16-bit weights (`watch_clones`).

    torch calls the hook before every step of any optimizer, until `end_watch`. It is only registered if the recipe
    needs something of the optimizer.
    """
    scaled = recipe.loss_scale is not None and recipe.loss_scale.scales
    kept = recipe.master, recipe.codes, recipe.projection, recipe.moments != "fp32", recipe.weights != "fp32"
    if scaled or any(kept) or recipe.update_rounding != "nearest_even":
        reference, seen = weakref.ref(model), weakref.WeakSet[torch.optim.Optimizer]()

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            followed = reference()
            if followed is None:
                remove_after_step(optimizer, handle)
            elif optimizer not in seen:
                seen.add(optimizer)
                if recipe.weights != "fp32":
                    watch_clones(followed, optimizer, recipe.name)
                if _look(followed, recipe, optimizer):
                    remove_after_step(optimizer, handle)

        part_of(model).following.watch = handle = register_optimizer_step_pre_hook(look)


def end_watch(model: nn.Module) -> None:
    """Remove the hook of `watch`: the model's optimizer knows the recipe, or the model was reverted."""
    part = part_of(model).following
    if part is not None and part.watch is not None:
        part.watch.remove()
        part.watch = None


def _look(model: nn.Module, recipe: Recipe, optimizer: torch.optim.Optimizer) -> bool:
    """Warn if this optimizer does not do all that the recipe needs; returns whether it warned."""
    own = {id(p) for p in model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
    told = [*_lacks(recipe, optimizer, stepped)] if stepped else []
    if told:
        warnings.warn(
            f"{type(model).__name__} follows recipe {recipe.name!r}, and its {type(optimizer).__name__} does not: "
            f"{'; '.join(told)}. Hand it over before the first step, optimizer, scaler = halfstep.optimize(model, "
            "optimizer), or call halfstep.prepare in place of halfstep.apply; and drive the loop with that scaler. For "
            "an optimizer without a counterpart take a recipe of float32 weights (bf16-mixed)",
            stacklevel=4,  # the loop, past torch's wrapper of step
        )
    return bool(told)


def _lacks(recipe: Recipe, optimizer: torch.optim.Optimizer, stepped: list[nn.Parameter]) -> Iterator[str]:
    """Texts that say which parts of the recipe a step of this optimizer leaves out."""
    if recipe.loss_scale is not None and recipe.loss_scale.scales and not _is_scaled():
        yield "the loss is not scaled, and small gradients are zero in fp16 (halfstep.LossScaler() does, beside it)"
    if hasattr(optimizer, "awaits_scaler"):  # one of halfstep's, configured by its user
        return
    if any(p.itemsize < torch.float32.itemsize for p in stepped):
        lost = f"updates below half the spacing of {recipe.weights} weights are lost"
        if recipe.master is not None:
            yield f"it keeps no masters ({recipe.master}), and {lost}"
        elif recipe.update_rounding != "nearest_even" and not getattr(optimizer, "bf16_stochastic_round", False):
            yield f"it rounds weights to nearest and not by chance, and {lost}"
    if type(optimizer).__module__.startswith("torch."):  # others, such as bitsandbytes', were chosen for their storage
        if recipe.codes is not None:
            yield "weights and gradients are kept in float32, and not as codes"
        if recipe.moments != "fp32" or recipe.projection is not None:
            yield "moments are not kept as the recipe says"


def _is_scaled() -> bool:
    """Whether the call stack shows an enabled loss scaler that calls this step: torch's, halfstep's or a subclass."""
    callers: list[Any] = [frame.f_locals.get("self") for frame, _ in walk_stack(None)]
    return any(hasattr(type(caller), "unscale_") and caller.is_enabled() for caller in callers)


_PARAMETERS, _VALUES = 8, 2048
"""The number of parameters of a copy that are compared, the largest ones, and the number of values of each."""
_STEPS, _WRITES, _HELD = 256, 256, 8
"""The number of steps in which values are compared to find writes through `.data`, which change no version; the number
of writes that are examined before only those after a power of two are; and the number of writes in a row that must
leave most values unchanged for a warning."""
_ALIKE = 8.0
"""The largest ratio of distances at which rounding to nearest may change the nearer of two values and not the farther
one, since their spacings differ."""
_SEARCH, _CLONES, _NEAR = 8, 8, 0.5
"""Before an optimizer's steps 8, 64, 512, ... all live objects are searched for clones (0.1 s for half a million
objects); the number of clones that are watched; and the largest relative distance of a clone from the weights."""
_Place = Callable[[], Tensor | None]
"""A function that returns a tensor as it is now, or None if it is gone."""


class Copied:
    """Links a deepcopy to the model that it was made of; empty after pickling."""

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self.model = model
        self.copy: Callable[[], nn.Module | None] = nothing

    def __deepcopy__(self, memo: object) -> "Copied":
        return self

    def __reduce__(self) -> Any:
        return Copied, (nothing,)


def watch_copy(copied: Copied, copy: nn.Module, recipe: str) -> None:
    """Register a hook that warns if a deepcopy of a model with weights in fewer bits than float32 is used as an average
    of its weights.

    torch calls the hook before every step of any optimizer until it is known what the copy is. A copy is an average if
    it is written to step after step and most of its values do not change although the weights differ from them. A
    snapshot, or a target network that copies the weights, equals the weights when written to; a trained copy has
    gradients; and stochastic rounding, or rounding from a float32 average, changes near values as well as far ones. If
    the copy is trained, its optimizer is watched for clones (`watch_clones`).
    """
    copied.copy = weakref.ref(copy)
    model = copied.model()
    if model is not None and (places := _places(copy)):
        watch = _Watch(places, _places(model), "a copy.deepcopy of the model", recipe, _is_made_by_torch())

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not watch.is_open():
                remove_after_step(optimizer, handle)
                if (trained := copied.copy()) is not None:
                    watch_clones(trained, optimizer, recipe)

        handle = register_optimizer_step_pre_hook(look)


def watch_clones(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str) -> None:
    """Register a hook that warns if clones of 16-bit weights are used as their average, as in diffusers' EMAModel and
    in torch_ema.

    Such clones are plain tensors, which no hook reports. So before a few steps of this optimizer all live tensors are
    searched for 16-bit ones with the shape of the largest parameter that it steps on, and values near it. (Clones of
    CodeTensors are float32.) An optimizer that steps on no such parameter gets no hook.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if not isinstance(p, CodeTensor)}
    if places := _places(model, trained)[:1]:
        optimizer.register_step_pre_hook(_Search(weakref.ref(model), places, recipe).look)


class _Search:
    """Searches for clones of an optimizer's largest parameter, and watches those found."""

    def __init__(self, model: Callable[[], nn.Module | None], places: Sequence[_Place], recipe: str) -> None:
        self._model, self._places, self._recipe = model, places, recipe
        self._steps, self._next = 0, _SEARCH
        self._watches: list[_Watch] = []

    def look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        if self._watches or self._steps == self._next:
            self._watch(optimizer)

    @untraced
    @torch.no_grad()
    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps == self._next:
            self._next *= _SEARCH
            self._watches = [
                _Watch([weakref.ref(clone)], self._places, "clones of the parameters", self._recipe)
                for clone in self._clones(optimizer)
            ]
        still = [watch for watch in self._watches if watch.is_open()]
        if any(watch._held == _HELD for watch in self._watches):
            still, self._next = [], 0
        self._watches = still

    def _clones(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Live tensors that may be clones: not trained, and neither a model copy's nor the optimizer's."""
        model, found = self._model(), _parameters(self._places)
        if model is None or not found:
            return []
        (parameter,) = found
        weights, memory, objects = _values(found), parameter.untyped_storage().data_ptr(), gc.get_objects()
        copies = (each.copy() for each in objects if type(each) is Copied and each.model() is model)
        known = {id(state) for states in optimizer.state.values() for state in states.values()}
        known |= {id(tensor) for module in (model, *filter(None, copies)) for tensor in module.parameters()}
        alike = (
            each
            for each in objects
            if type(each) in (Tensor, nn.Parameter)
            and (each.shape, each.layout, each.is_meta) == (parameter.shape, parameter.layout, False)
            and (_is_narrow(each) and not each.requires_grad and id(each) not in known)
            and (each.untyped_storage().nbytes() and each.untyped_storage().data_ptr() != memory)
        )
        far = _NEAR * weights.norm()
        return [each for each in alike if (_values([each]).to(weights.device) - weights).norm() < far][:_CLONES]


class _Watch:
    """Compares the parameters of a copy, from step to step, with the model's, to recognize an average."""

    def __init__(
        self, places: Sequence[_Place], others: Sequence[_Place], where: str, recipe: str, by_torch: bool = False
    ) -> None:
        self._places, self._others, self._where, self._recipe = places, others, where, recipe
        self._by_torch = by_torch
        self._steps = self._writes = self._held = 0
        found = _parameters(places)
        self._before, self._version = _values(found), _version(found)

    @torch.no_grad()
    def is_open(self) -> bool:
        """Examine what was written since the last step; returns whether to go on watching."""
        copy, model = _parameters(self._places), _parameters(self._others)
        if not copy or len(copy) != len(model) or any(p.grad is not None for p in copy):
            return False
        self._steps += 1
        version = _version(copy)
        if version == self._version and self._steps > _STEPS:
            return True
        if version != self._version and not _is_looked_at(self._writes + 1):
            self._version, self._writes, self._held = version, self._writes + 1, 0
            return True
        before, now = self._before, _values(copy)
        written = version != self._version or not torch.equal(before, now)
        self._before, self._version = now, version
        if not written:
            return True
        self._writes += 1
        if self._writes > _WRITES and self._writes.bit_count() == 1:  # the writes before it were not examined
            return True
        held = _is_held(before, now, _values(model).to(now.device), self._by_torch)
        self._held = self._held + 1 if held else 0
        if self._held == _HELD:
            _warn(copy[0], self._where, self._recipe)
        return held is not None and self._held < _HELD


def _is_looked_at(write: int) -> bool:
    """Whether to examine this write: one of the first, or a few after each power of two, since an average over more and
    more models (SWA) loses more of each."""
    return write <= _WRITES or write - (1 << write.bit_length() - 1) <= _HELD


def _is_held(before: Tensor, now: Tensor, weights: Tensor, by_torch: bool) -> bool | None:
    """Whether a write left most of the values that differ from the weights unchanged. None if it changed values much
    nearer to the weights than unchanged ones, as stochastic rounding does, unless `by_torch`."""
    if torch.equal(now, weights):
        return False
    distance = (weights - before).abs() / before.abs().clamp(min=torch.finfo(torch.float32).tiny)
    moved = now != before
    held = (weights != before) & ~moved
    if not by_torch and moved.any() and held.any() and distance[moved].min() * _ALIKE < distance[held].max():
        return None
    return bool(2 * held.sum() > (weights != before).sum())


def _is_made_by_torch() -> bool:
    """Whether the call stack shows AveragedModel making the deepcopy, to average by one of torch's functions. These
    also round intermediate results to 16 bits, so in fp16 whether a value changes depends on its significand, not on
    its distance from the weight."""
    found = next((f.f_locals for f, _ in walk_stack(None) if isinstance(f.f_locals.get("self"), AveragedModel)), None)
    functions = [] if found is None else [found.get(name) for name in ("avg_fn", "multi_avg_fn")]
    return found is not None and all(f is None or f.__module__ == AveragedModel.__module__ for f in functions)


def _warn(parameter: Tensor, where: str, recipe: str) -> None:
    kept = "codes" if isinstance(parameter, CodeTensor) else str(parameter.dtype)
    warnings.warn(
        f"an average of the weights is kept in {where}, in {kept}, as recipe {recipe!r} keeps "
        "weights: most of what each step adds is rounded away, and most of the average never moves. Keep it in "
        "float32: make it before halfstep.prepare (AveragedModel with avg_fn=get_ema_avg_fn(decay), EMAModel, or a "
        "copy.deepcopy), or average state_dict() values in float32",
        stacklevel=5,  # the loop, past torch's wrapper of step
    )


def _places(model: nn.Module, among: Container[int] | None = None) -> list[_Place]:
    """Functions that return the largest trained parameters in fewer bits than float32, of those with ids in `among`."""
    found = [
        (-parameter.numel(), path, name)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and _is_narrow(parameter)
        if among is None or id(parameter) in among
    ]
    owners = ((weakref.ref(model.get_submodule(path)), name) for _, path, name in sorted(found)[:_PARAMETERS])
    return [partial(_parameter, owner, name) for owner, name in owners]


def _parameter(owner: Callable[[], nn.Module | None], name: str) -> Tensor | None:
    module = owner()
    return None if module is None else module._parameters.get(name)


def _is_narrow(parameter: Tensor) -> bool:
    few = isinstance(parameter, CodeTensor) or parameter.itemsize < torch.float32.itemsize
    return few and parameter.is_floating_point() and not hasattr(parameter, "device_mesh")


def _parameters(places: Sequence[_Place]) -> list[Tensor]:
    """The parameters as they are now; empty if one is gone or was cast to float32."""
    found = [place() for place in places]
    kept = [parameter for parameter in found if parameter is not None and _is_narrow(parameter)]
    return kept if len(kept) == len(found) else []


def _version(parameters: Sequence[Tensor]) -> int:
    return sum(parameter._version for parameter in parameters if not parameter.is_inference())


@torch.no_grad()
def _values(parameters: Sequence[Tensor]) -> Tensor:
    flat = (values_of(parameter.detach()).reshape(-1) for parameter in parameters)
    return torch.cat([values[:: max(1, len(values) // _VALUES)][:_VALUES].float() for values in flat])


def nothing() -> None:
    """A function that returns None, for missing references: the origin of a pickled model, the root of a part that was
    copied alone."""


_ENDED = "_halfstep_ended"
"""The attribute of an optimizer with the handles of hooks to remove after its step."""


def remove_after_step(optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
    """Remove a hook when this optimizer's step is over: during the step torch iterates over all hooks and fails if one
    is removed."""
    ended: ExitStack | None = vars(optimizer).get(_ENDED)
    if ended is None:
        ended = vars(optimizer)[_ENDED] = ExitStack()
        optimizer.register_step_post_hook(lambda *_: ended.close())
    ended.callback(handle.remove)
