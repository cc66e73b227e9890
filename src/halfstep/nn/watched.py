"""What steps of optimizers lose of a recipe: those that do not know it, and averages of 16-bit weights in 16 bits."""

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
    """Warn once of what the recipe loses, should an optimizer step on the model before `optimize` has taken one, and
    look for averages of 16-bit weights among its steps.

    Until then torch calls a hook before every step of any optimizer, and only where the recipe asks something of it.
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
    """The model's optimizer knows the recipe, or the model follows none any more."""
    part = part_of(model).following
    if part is not None and part.watch is not None:
        part.watch.remove()
        part.watch = None


def _look(model: nn.Module, recipe: Recipe, optimizer: torch.optim.Optimizer) -> bool:
    """Whether that optimizer's step loses something of the recipe, which is warned of."""
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
    """What of the recipe a step of that optimizer leaves out."""
    if recipe.loss_scale is not None and recipe.loss_scale.scales and not _is_scaled():
        yield "the loss is not scaled, and small gradients are zero in fp16 (halfstep.LossScaler() does, beside it)"
    if hasattr(optimizer, "awaits_scaler"):  # one of halfstep's own, which keeps and rounds as it was told
        return
    if any(p.itemsize < torch.float32.itemsize for p in stepped):
        lost = f"updates below half the spacing of {recipe.weights} weights are lost"
        if recipe.master is not None:
            yield f"it keeps no masters ({recipe.master}), and {lost}"
        elif recipe.update_rounding != "nearest_even" and not getattr(optimizer, "bf16_stochastic_round", False):
            yield f"it rounds weights to nearest and not by chance, and {lost}"
    if type(optimizer).__module__.startswith("torch."):  # others, such as bitsandbytes', were taken for how they keep
        if recipe.codes is not None:
            yield "weights and gradients are kept in float32, and not as codes"
        if recipe.moments != "fp32" or recipe.projection is not None:
            yield "moments are not kept as the recipe says"


def _is_scaled() -> bool:
    """Whether a loss scaler that is enabled takes this step: torch's, halfstep's or a subclass of theirs."""
    callers: list[Any] = [frame.f_locals.get("self") for frame, _ in walk_stack(None)]
    return any(hasattr(type(caller), "unscale_") and caller.is_enabled() for caller in callers)


_PARAMETERS, _VALUES = 8, 2048
"""How many parameters of a copy are looked at, the largest ones, and how many values of each."""
_STEPS, _WRITES, _HELD = 256, 256, 8
"""In how many steps writes through `.data`, which torch does not count, are looked for; how many writes are looked at
before only those after a power of two are; and how many in a row must leave most values as they were for a warning."""
_ALIKE = 8.0
"""Up to which factor of distance rounding to nearest may move one value and leave another: their spacings differ."""
_SEARCH, _CLONES, _NEAR = 8, 8, 0.5
"""Clones are looked for among all live objects, which takes 0.1 s where there are half a million, before the steps of
an optimizer whose numbers are powers of this; how many are watched; and how far, relatively, one may be from the
weights."""
_Place = Callable[[], Tensor | None]
"""What is there now, if anything."""


class Copied:
    """Which model a deepcopy was made of; a pickle does not say."""

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self.model = model
        self.copy: Callable[[], nn.Module | None] = nothing

    def __deepcopy__(self, memo: object) -> "Copied":
        return self

    def __reduce__(self) -> Any:
        return Copied, (nothing,)


def watch_copy(copied: Copied, copy: nn.Module, recipe: str) -> None:
    """Warn, should a deepcopy of a model whose weights have fewer bits than float32 become their average.

    Until it is known what the copy is, torch calls a hook before every step of any optimizer. A copy that is written to
    after step upon step, and of which most values stay where they are though the weights are elsewhere, is an average.
    A snapshot, and a target network that takes the weights as they are, equal the weights once they are written to; a
    copy that is trained has gradients; and what is rounded stochastically, or from an average in float32, moves near
    values as well as far ones. The optimizer of a copy that is trained is searched for clones (`watch_clones`).
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
    """Warn, should clones of 16-bit weights become their average, as in diffusers' EMAModel and in torch_ema.

    Such clones are plain tensors, which no hook reports. So before a few steps of this optimizer all live tensors are
    looked through for those of the shape of its largest parameter of the model, in 16 bits and near its values. Clones
    of codes are in float32. An optimizer that steps on no such parameter is left alone.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if not isinstance(p, CodeTensor)}
    if places := _places(model, trained)[:1]:
        optimizer.register_step_pre_hook(_Search(weakref.ref(model), places, recipe).look)


class _Search:
    """What was found of clones of an optimizer's largest parameter, and what is watched of it."""

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
        """Live tensors that may be clones: neither trained, nor of a model's copy, nor the optimizer's."""
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
    """What the parameters of a copy were before the last step."""

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
        """Whether there is more to be seen, after a look at what was written since the last step."""
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
        if self._writes > _WRITES and self._writes.bit_count() == 1:  # since the last look there were others
            return True
        held = _is_held(before, now, _values(model).to(now.device), self._by_torch)
        self._held = self._held + 1 if held else 0
        if self._held == _HELD:
            _warn(copy[0], self._where, self._recipe)
        return held is not None and self._held < _HELD


def _is_looked_at(write: int) -> bool:
    """Whether a write is one of the first, or of those after a power of two: an average over more and more models
    (SWA) loses more of each."""
    return write <= _WRITES or write - (1 << write.bit_length() - 1) <= _HELD


def _is_held(before: Tensor, now: Tensor, weights: Tensor, by_torch: bool) -> bool | None:
    """Whether a write left most values that are not the weights'; None where it moved others than the farthest, which
    rounding by chance does, and no function of torch's own (`by_torch`)."""
    if torch.equal(now, weights):
        return False
    distance = (weights - before).abs() / before.abs().clamp(min=torch.finfo(torch.float32).tiny)
    moved = now != before
    held = (weights != before) & ~moved
    if not by_torch and moved.any() and held.any() and distance[moved].min() * _ALIKE < distance[held].max():
        return None
    return bool(2 * held.sum() > (weights != before).sum())


def _is_made_by_torch() -> bool:
    """Whether AveragedModel is making the deepcopy, to average by one of torch's functions: their products are rounded
    too in 16 bits, so that in fp16 a value moves or not by its significand, and not by its distance."""
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
    """Where the largest trained parameters of fewer bits than float32 are, of those whose ids are `among` them."""
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
    """What is there now; nothing, where one is gone or has been widened."""
    found = [place() for place in places]
    kept = [parameter for parameter in found if parameter is not None and _is_narrow(parameter)]
    return kept if len(kept) == len(found) else []


def _version(parameters: Sequence[Tensor]) -> int:
    return sum(parameter._version for parameter in parameters)


@torch.no_grad()
def _values(parameters: Sequence[Tensor]) -> Tensor:
    flat = (values_of(parameter.detach()).reshape(-1) for parameter in parameters)
    return torch.cat([values[:: max(1, len(values) // _VALUES)][:_VALUES].float() for values in flat])


def nothing() -> None:
    """The model that a pickled one was copied from; the root of a part that was copied without it."""


_ENDED = "_halfstep_ended"
"""Where an optimizer has the handles of hooks that end with its step."""


def remove_after_step(optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
    """Remove a hook once this optimizer's step is over: in the step torch iterates over all of them, and fails if one
    goes, as one would whose model a garbage collection takes just then."""
    ended: ExitStack | None = vars(optimizer).get(_ENDED)
    if ended is None:
        ended = vars(optimizer)[_ENDED] = ExitStack()
        optimizer.register_step_post_hook(lambda *_: ended.close())
    ended.callback(handle.remove)
