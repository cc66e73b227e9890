"""How parameters are stepped: decided once for as long as their tensors stay where they are, then taken every step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from halfstep import ops
from halfstep.kernels.cpu.optimizer import Update as KernelUpdate, Updates
from halfstep.optim.rules.base import Fused, Step, UpdateRule
from halfstep.optim.shards import is_spread, like, local, positions
from halfstep.optim.stored import Stored
from halfstep.optim.update import Update, move
from halfstep.quant import derive_seed
from halfstep.quant.masters import Master, Own


@dataclass(frozen=True, eq=False)
class Way:
    """How one parameter is stepped, for as long as its tensors stay where they are."""

    parameter: Any
    """A `Tensor`, with a gradient whenever it is stepped."""
    group: dict[str, Any]
    index: int
    rule: UpdateRule
    step: Step
    """The tensors of every step; of one of which the number is 0, and the gradient stands for none."""
    count: Tensor
    """How many steps were taken."""
    fused: Fused | None
    plain: bool
    """Whether the gradient is taken as it is: the parameter is neither spread over ranks nor codes."""
    noisy: bool
    """Whether each step has a seed of stochastic rounding."""


class Batch:
    """Parameters that one call of a CPU kernel steps: of one group, and stepped as often as each other."""

    def __init__(self, ways: list[Way]) -> None:
        self.ways, self.counts = ways, list(map(_count, ways))
        self.weights = list({id(t): t for way in ways for t in (way.step.weight, way.parameter)}.values())
        self.costly = list(compress(map(_parameter, ways), map(_costly, ways)))
        self.fused = Updates(list(map(_lies, ways)), ways[0].fused.tile)  # type: ignore[union-attr]


def batched(ways: Iterable[Way]) -> tuple[list[Batch], list[Way]]:
    """Those that kernels step together, and those that are stepped one after the other."""
    alone, alike = list[Way](), dict[Any, list[Way]]()
    for way in ways:
        if isinstance(way.fused, KernelUpdate) and way.fused.kind is not None:
            key = *way.fused.kind, way.noisy, way.plain, id(way.group), id(way.rule), int(way.count)
            alike.setdefault(key, []).append(way)
        else:
            alone.append(way)
    return list(map(Batch, alike.values())), alone


_count, _costly = attrgetter("count"), attrgetter("step.master.costly")
_lies = attrgetter("fused.weight", "fused.kept", "fused.arguments")
_parameter, _grad = attrgetter("parameter"), attrgetter("parameter.grad")


class Stepping(Stored):
    """Steps parameters: a `Batch` by one call of a CPU kernel, others one after the other, by the rule's fused update
    where there is one and else by the reference."""

    _watch: Callable[[Update], None] | None
    """Is told of every update."""
    _versions: dict[Tensor, int]
    """torch's count of writes to parameters with masters that are costly to follow, as the last step left them."""

    def _name(self, parameter: Tensor, index: int) -> str:
        """What to call a parameter in an error."""
        return f"parameter {index}"

    def _look(self, way: Way, grad: Tensor, grad_scale: float = 1.0) -> None:
        """Let the rule see a gradient before any weight moves, where it wants to."""
        if way.rule.look is not None:
            way.rule.look(self._next(way, grad, grad_scale), lambda: self._name(way.parameter, way.index))

    def _next(self, way: Way, grad: Tensor, grad_scale: float) -> Step:
        """What the next update of a parameter takes."""
        step, number = way.step, int(way.count) + 1
        master: Any = step.master
        if way.noisy:
            seed = derive_seed(way.group["rounding_seed"], number, way.index)
            master = replace(master, seed=seed, positions=positions(way.parameter))
        grad = self.gradient(way, grad)
        return replace(step, grad=grad, master=master, number=number, group=way.group, grad_scale=grad_scale)

    def gradient(self, way: Way, grad: Tensor) -> Tensor:
        """A gradient as the update takes it."""
        return grad if way.plain else _gradient(way.parameter, way.rule, way.step.master, grad)

    def way(
        self, parameter: Tensor, group: dict[str, Any], index: int, grad: Tensor, varies: Any, kernels: bool = True
    ) -> Way:
        """How a parameter is stepped by gradients like that one, by a kernel where there is one."""
        plan, state = self.plan(parameter, group, varies), self.state[parameter]
        master = plan.master
        if not state.keys() >= plan.held:
            self._begin_state(parameter, plan)
        spread = hasattr(parameter, "device_mesh")
        plain = not spread and not isinstance(parameter, ops.CodeTensor) and not isinstance(grad, ops.CodeTensor)
        # Of a parameter that is spread over ranks, this one's part; whole where norms of the whole enter.
        weight = parameter
        kept = {name: state[name] for name in master.keeps} if master.keeps else {}
        moments = dict(zip(plan.parts, map(state.__getitem__, plan.parts), strict=True))
        if spread:
            weight, kept = local(parameter), {name: local(value) for name, value in kept.items()}
            moments = {name: local(value) for name, value in moments.items()}
        noisy = isinstance(master, Own) and master.rounding == "stochastic"
        read = grad if plain else _gradient(parameter, plan.rule, master, grad)
        rest: Any = moments, 0, group, 1.0, plan.kinds, plan.coded
        fused = None
        if kernels and not (noisy and spread and positions(parameter) is not None):
            fused = plan.rule.fused(Step(weight, master, kept, read, *rest))
        step = Step(weight, master, kept, weight, *rest)  # a gradient that was kept would not be freed
        return Way(parameter, group, index, plan.rule, step, state["step"], fused, plain, noisy)

    def _update(self, way: Way, grad: Tensor, grad_scale: float, numbers: dict[Any, Any]) -> None:
        """Step a parameter; `numbers` are those that other parameters' updates were given in this step."""
        parameter, group, moved = way.parameter, way.group, False
        if way.fused is not None:
            number = int(way.count) + 1
            seed = derive_seed(group["rounding_seed"], number, way.index) if way.noisy else None
            given = _numbers(way, number, grad_scale, numbers)
            moved = way.fused(grad if way.plain else self.gradient(way, grad), given, seed)
        if moved:
            torch.autograd.graph.increment_version(way.step.weight)
        else:
            written = not way.step.master.costly or self._was_written(parameter)
            move(way.rule, self._next(way, grad, grad_scale), parameter, written, self._watch)
        way.count.add_(1)
        if not way.plain and is_spread(parameter):
            torch.autograd.graph.increment_version(parameter)
        if way.step.master.costly:
            self.note_written(parameter)

    def _update_batch(self, batch: Batch, grad_scale: float, numbers: dict[Any, Any]) -> None:
        """Step parameters by one kernel; one after the other where each has norms of its own, or where someone has
        written to the counts of their steps."""
        ways, way, counts = batch.ways, batch.ways[0], set(map(int, batch.counts))
        number, grads, seeds = max(counts) + 1, list(map(_grad, ways)), None
        given = _numbers(way, number, grad_scale, numbers)
        if len(counts) > 1 or given.program.normed.results:
            for way in ways:
                self._update(way, way.parameter.grad, grad_scale, numbers)
            return
        if not way.plain:
            grads = list(map(self.gradient, ways, grads))
        if way.noisy:
            seeds = [derive_seed(way.group["rounding_seed"], number, own.index) for own in ways]
        batch.fused(grads, given.program.element, (given.scale, *given.taken), seeds)
        torch.autograd.graph.increment_version(batch.weights)
        torch._foreach_add_(batch.counts, 1)
        for parameter in batch.costly:
            self.note_written(parameter)

    def follow(self, parameter: Tensor) -> None:
        """Resync the master of a parameter, where it may have been written to since the last step."""
        if self._was_written(parameter):
            master, state = self._master(parameter), self.state[parameter]
            ops.follow(master, local(parameter), {name: local(state[name]) for name in master.keeps})

    def _was_written(self, parameter: Tensor) -> bool:
        return self._versions.get(parameter) != parameter._version

    def note_written(self, parameter: Tensor) -> None:
        """A parameter is as a step left it."""
        self._versions[parameter] = parameter._version


def _numbers(way: Way, number: int, grad_scale: float, numbers: dict[Any, Any]) -> Any:
    """The numbers of a step, found once for all parameters of a group that take them."""
    key = number, id(way.group), id(way.rule)
    if key not in numbers:
        numbers[key] = way.rule.numbers(number, way.group, grad_scale)
    return numbers[key]


def _gradient(parameter: Tensor, rule: UpdateRule, master: Master, grad: Tensor) -> Tensor:
    grad = like(parameter, master.gradient(grad))
    return local(grad) if rule.elementwise else grad
