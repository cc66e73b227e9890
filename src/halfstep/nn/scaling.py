"""Scaling states (of delayed scaling): buffers of the layers, advanced once an optimizer step.

Forward and backward only raise the amax of the current step, so recomputation (activation checkpointing) and several
micro-batches change nothing but that maximum. Only `Scalings.advance` updates the factors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import LossScaleError, RecipeError
from halfstep.kernels.operators import Histories, history_kernel
from halfstep.nn.adopt import Applied, extend
from halfstep.nn.ranks import check_states
from halfstep.nn.schedule import overdue
from halfstep.ops.part import part_of
from halfstep.quant import Quantizer
from halfstep.quant.rounding import capturing
from halfstep.quant.scaling import StatefulScaling
from halfstep.quant.scaling.base import STATES
from halfstep.recipe import LinearSpec
from halfstep.text import some


PREFIX = STATES
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's own name for what DDP does not broadcast


def attach(model: nn.Module, specs: Mapping[str, LinearSpec], products: Mapping[str, Sequence[str]]) -> None:
    """Register a scaling state for each operand that needs one: non-persistent buffers that DDP does not broadcast.

    Args:
        products: by path, the names of a layer's matmuls if it has several: each gets states of its own.
    """
    for path, spec in specs.items():
        if not spec.states:
            continue
        module, rules = model.get_submodule(path), dict[str, Any]()
        for product in products.get(path, ("",)):
            prefix = _buffer(product)
            for name, quantizer in spec.states.items():
                rules[prefix + name] = quantizer.stateful
        attach_rules(module, rules, next(module.parameters()).device)
        extend(module, Surviving(PREFIX, _initial))
    ignore(model, [name for name, _ in model.named_buffers() if PREFIX in name])


def attach_rules(module: nn.Module, rules: Mapping[str, StatefulScaling], device: torch.device) -> None:
    """Register initial states on one module, by the names of their buffers."""
    for name, rule in rules.items():
        module.register_buffer(name, rule.init(device), persistent=False)


def detach_rules(module: nn.Module) -> None:
    """Remove one module's states."""
    for name, _ in _buffers(module):
        delattr(module, name)


def rules_of(module: nn.Module) -> dict[str, StatefulScaling]:
    """The scaling rule of each of a module's states, by the name of its buffer."""
    spec: Any = part_of(module).linear
    return {name: spec.states[name.rpartition("__")[2].removeprefix(PREFIX)].stateful for name, _ in _buffers(module)}


def detach(model: nn.Module) -> None:
    """Remove the states of all modules."""
    for module in model.modules():
        detach_rules(module)
    unignore(model, PREFIX)


def ignored(model: nn.Module) -> list[str]:
    """The names of the states among the buffers that DDP ignores."""
    return [name for name in getattr(model, _IGNORED, ()) if PREFIX in name]


def ignore(model: nn.Module, names: Sequence[str]) -> None:
    """Add names to the buffers that DDP ignores, whether they exist yet or not."""
    if names:
        setattr(model, _IGNORED, [*getattr(model, _IGNORED, ()), *names])


def unignore(model: nn.Module, part: str) -> None:
    """Remove the names that contain `part` from the buffers that DDP ignores."""
    kept = [name for name in getattr(model, _IGNORED, ()) if part not in name]
    vars(model).pop(_IGNORED, None)
    ignore(model, kept)


def states_of(module: nn.Module, product: str = "") -> dict[str, Tensor]:
    """The states of a layer, or of one of its matmuls, by operand."""
    prefix = _buffer(product)
    return {name.removeprefix(prefix): state for name, state in _buffers(module, prefix)}


def moved(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the states that differ from their initial values, by layer and operand."""
    return {
        name: state.clone() for name, state, rule in _states(model) if not torch.equal(state, rule.init(state.device))
    }


def _buffer(product: str) -> str:
    return f"{PREFIX}{product}__" if product else PREFIX


def _states(model: nn.Module) -> Iterator[tuple[str, Tensor, StatefulScaling]]:
    """(layer and operand, state, rule) of all scaling states."""
    for path, module in model.named_modules():
        for name, rule in rules_of(module).items():
            yield f"{path}.{name.removeprefix(PREFIX)}", module.get_buffer(name), rule


def _buffers(module: nn.Module, prefix: str = PREFIX) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in module._buffers.items() if name.startswith(prefix) and b is not None]


def _initial(module: nn.Module, name: str, device: torch.device) -> Tensor:
    return rules_of(module)[name].init(device)


class _Known(NamedTuple):
    """A cache of a model's states, valid for one `Applied` record as long as modules have the same buffers."""

    applied: Applied
    tables: list[dict[str, Tensor | None]]
    buffers: list[int]
    alike: dict[tuple[Any, int], list[Tensor]]  # states that can be stacked and advanced together
    kernel: Histories | None
    """A kernel that advances all of them, if one applies."""


def _find(model: nn.Module, applied: Applied) -> _Known:
    tables: list[dict[str, Tensor | None]] = []
    alike: dict[tuple[Quantizer, int], list[Tensor]] = {}
    for module in model.modules():
        spec: Any = None
        if module._buffers and isinstance(module._buffers, dict):  # not of a scripted module
            tables.append(module._buffers)
        for name, state in module._buffers.items():
            if state is not None and name.startswith(PREFIX):
                spec = spec or vars(module)["_halfstep"].linear
                quantizer: Quantizer = spec.states[name.removeprefix(PREFIX).rpartition("__")[2]]
                alike.setdefault((quantizer, state.numel()), []).append(state)
    groups: list[Any] = []
    for (quantizer, _), states in alike.items():
        groups.append((states, quantizer.stateful, quantizer.format))
    kernel = history_kernel(groups) if groups else None
    return _Known(applied, tables, list(map(id, chain.from_iterable(map(dict.values, tables)))), alike, kernel)


class Scalings:
    """Advances, saves and loads a model's scaling states.

    Args:
        process_group: the ranks that agree on amaxes, which hold the same layers. None: the default group, if any.
    """

    def __init__(self, model: nn.Module, process_group: Any = None) -> None:
        self._model = model
        self._process_group = process_group

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all states, by layer and operand; empty for a recipe without."""
        return {name: state.detach().clone() for name, state, _ in _states(self._model)}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore saved states.

        Raises:
            LossScaleError: they are of other layers or of another length. Nothing was changed.
        """
        own = {name: state for name, state, _ in _states(self._model)}
        if own.keys() != saved.keys():
            missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
            raise LossScaleError(
                f"the saved scaling state is of other layers: {some(missing) or 'none'} missing, "
                f"{some(extra) or 'none'} unexpected. Resume with the model and the recipe it was saved under"
            )
        for name, state in own.items():
            if saved[name].shape != state.shape:
                raise LossScaleError(
                    f"scaling state {name!r} has {saved[name].numel() - 1} steps of history, this recipe "
                    f"{state.numel() - 1}. Resume with the recipe it was saved under"
                )
        self._set(saved)

    def reset(self) -> None:
        """Reset every state to its initial value."""
        self._set({name: rule.init(state.device) for name, state, rule in _states(self._model)})

    @torch.no_grad()
    def _set(self, saved: Mapping[str, Tensor]) -> None:
        for name, state, _ in _states(self._model):
            state.copy_(saved[name])
        if (cached := part_of(self._model).following.cached) is not None:
            cached.clear()
        if saved:  # weights are loaded with them, which is no optimizer step
            clock = part_of(self._model).applied.clock
            assert clock is not None
            clock.begin(self._model)

    def advance(self, skipped: bool | Tensor = False) -> None:
        """End an optimizer step: advance the states, after ranks have agreed on the largest amaxes.

        A skipped step changes nothing and drops its amaxes, on every rank if one rank says so. An amax that is not
        finite on one rank is infinite on all. The host does not wait for a GPU: `skipped` may be a scalar on it.

        Raises:
            RecipeError: every forward of the step ran in eval(), which records nothing. Nothing was changed.
            ModelError: as `check_states`.
        """
        own = part_of(self._model)
        applied: Applied = own.applied
        known: _Known | None = own.following.states
        clock = applied.clock
        buffers = () if known is None else list(map(id, chain.from_iterable(map(dict.values, known.tables))))
        if known is None or known.applied is not applied or buffers != known.buffers:
            known = own.following.states = _find(self._model, applied)
        together = dist.is_available() and dist.is_initialized()
        if together and not own.agreed and not capturing():
            sizes = {name: state.numel() for name, state, _ in _states(self._model)}
            check_states(self._model, sizes, self._process_group)
        if clock is None:
            return
        if known.alike and clock.in_eval(self._model) and not skipped and not self._recorded():
            raise RecipeError(
                f"{type(self._model).__name__} is in eval(), where its scaling states record nothing, and its weights "
                "have changed: call model.train() before the forwards of training. Parts that are to stay in "
                "evaluation (dropout, BatchNorm, a frozen backbone) take part.eval() after it, which is honoured"
            )
        clock.end(self._model)
        if own.following.cached is not None:
            own.following.cached.clear()
        if not known.alike:  # the clock counts steps for stages alone
            return
        if together:
            skipped = self._agree([state for states in known.alike.values() for state in states], skipped)
        if known.kernel is not None:
            known.kernel.advance(skipped)
            return
        for (quantizer, _), states in known.alike.items():
            stack = torch.stack(states)  # so that each operation runs once for all states
            forgotten = stack.clone()
            forgotten[:, 1] = 0.0
            quantizer.stateful.advance(stack, quantizer.format)
            says = skipped.to(stack) if isinstance(skipped, Tensor) else stack.new_full((), float(skipped))
            torch._foreach_copy_(states, list(torch.where(says > 0, forgotten, stack).unbind()))

    def _agree(self, states: list[Tensor], skipped: bool | Tensor) -> Tensor:
        """All-reduce the amaxes of all states by maximum, in place; returns a scalar above 0 if any rank skips the
        step."""
        amaxes = torch.stack([state[1] for state in states])
        says = skipped.to(amaxes) if isinstance(skipped, Tensor) else amaxes.new_full((), float(skipped))
        found = torch.cat([amaxes, says.reshape(1)])
        found = torch.where(found.isfinite(), found, torch.inf)  # gloo's maximum loses the NaN of some ranks
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._process_group)
        torch._foreach_copy_([state[1] for state in states], list(found[:-1].unbind()))
        return found[-1]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count that optimizer's steps by hooks, instead of inferring steps from changes of weights. A step before the
        last one was ended raises."""
        if (clock := part_of(self._model).applied.clock) is not None:
            clock.follow(optimizer)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        applied: Applied | None = part_of(self._model).applied
        clock = None if applied is None else applied.clock
        if applied is None or clock is None or not clock.is_pending(optimizer):
            return
        if applied.schedule is not None or clock.is_used() or self._recorded():
            raise overdue(self._model, clock.moves)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        applied, overflowed = part_of(self._model).applied, getattr(optimizer, "found_inf", None)
        if applied is not None and applied.clock is not None:
            applied.clock.step(optimizer, overflowed)

    def _recorded(self) -> bool:
        """Whether any amax was recorded in this step."""
        return any(bool(state[1]) for _, state, _ in _states(self._model))


@dataclass(frozen=True)
class Surviving:
    """Members of a layer whose buffers keep their values in `to_empty`, and get initial values when they come from the
    meta device."""

    prefix: str
    """The prefix of the buffers' names."""
    initial: Callable[[nn.Module, str, torch.device], Tensor]
    """initial(module, name, device): a buffer's initial value; a function at a module's top level."""

    def __call__(self, stock: type[nn.Module]) -> dict[str, Any]:
        prefix, initial = self.prefix, self.initial

        def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            before = dict(_buffers(self, prefix))
            stock._apply(self, *args, **kwargs)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for name, state in _buffers(self, prefix):
                    if state is not before[name] and state.dtype == before[name].dtype and not state.is_meta:
                        state.copy_(initial(self, name, state.device) if before[name].is_meta else before[name])
            return self

        def _load_from_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            stock._load_from_state_dict(self, *args, **kwargs)  # may replace meta parameters (assign=True)
            real = next((p.device for p in self.parameters() if not p.is_meta), None)
            for name, state in _buffers(self, prefix):
                if state.is_meta and real is not None and name in self._non_persistent_buffers_set:
                    self.register_buffer(name, initial(self, name, real), persistent=False)

        return {"_apply": _apply, "_load_from_state_dict": _load_from_state_dict}
