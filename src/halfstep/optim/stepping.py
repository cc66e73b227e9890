"""How an optimizer steps its parameters: decided once and reused as long as no tensor changes or moves.

On a GPU all tensors are stepped together, by a few kernel launches; on a CPU in batches by one kernel call each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import compress, count
from operator import attrgetter, ne
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep import ops
from halfstep.errors import OptimizerError
from halfstep.kernels.arithmetic import NOTHING, Program
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.cpu.optimizer import Update as KernelUpdate, Updates
from halfstep.kernels.gpu import plain
from halfstep.kernels.gpu.kinds import Options, Tensors, codes_of, kind_of
from halfstep.kernels.gpu.optimizer import Steps
from halfstep.ops import CodeTensor
from halfstep.optim.present import AddressRecord
from halfstep.optim.rules import Fused, Step, UpdateRule, with_codes
from halfstep.optim.shards import is_spread, like, local, part, positions, run_of
from halfstep.optim.stored import Stored
from halfstep.optim.update import CodedWeight, Update, move
from halfstep.quant import derive_seed
from halfstep.quant.masters import Master, Own
from halfstep.recipe import MASTER


# ---- parameters in batches, or one after the other -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Way:
    """How one parameter is stepped; valid as long as its tensors do not move."""

    parameter: Any
    """A `Tensor`, with a gradient whenever it is stepped."""
    group: dict[str, Any]
    index: int
    rule: UpdateRule
    step: Step
    """A template with the tensors of every step; its number (0) and gradient are placeholders."""
    count: Tensor
    """The number of steps taken."""
    fused: Fused | None
    plain: bool
    """Whether the gradient is used directly: neither parameter nor gradient is a DTensor or CodeTensor."""
    noisy: bool
    """Whether each step needs a seed for stochastic rounding."""


class Batch:
    """Parameters that one call of a CPU kernel steps: of one group, with equal step counts."""

    def __init__(self, ways: list[Way]) -> None:
        self.ways, self.counts = ways, list(map(_count, ways))
        self.indices = np.array(list(map(_index, ways)), np.uint64)
        self.weights = list({id(t): t for way in ways for t in (way.step.weight, way.parameter)}.values())
        self.costly = list(compress(map(_parameter, ways), map(_costly, ways)))
        self.fused = Updates(list(map(_lies, ways)), ways[0].fused.tile, self.counts)  # type: ignore[union-attr]


def batched(ways: Iterable[Way]) -> tuple[list[Batch], list[Way]]:
    """The batches of parameters that CPU kernels step together, and those that are stepped one by one."""
    alone, alike = list[Way](), dict[Any, list[Way]]()
    for way in ways:
        if isinstance(way.fused, KernelUpdate) and way.fused.kind is not None and way.count.dtype == torch.float32:
            key = *way.fused.kind, way.noisy, way.plain, id(way.group), id(way.rule), int(way.count)
            alike.setdefault(key, []).append(way)
        else:
            alone.append(way)
    return list(map(Batch, alike.values())), alone


_index, _count, _costly = attrgetter("index"), attrgetter("count"), attrgetter("step.master.costly")
_lies = attrgetter("fused.weight", "fused.kept", "fused.arguments")
_parameter, _grad = attrgetter("parameter"), attrgetter("parameter.grad")


class Stepping(Stored):
    """Steps parameters: a `Batch` by one call of a CPU kernel, others one by one, by the rule's fused update if there
    is one, else by the reference."""

    _watch: Callable[[Update], None] | None
    """A function that is called with every update."""
    _versions: dict[Tensor, int]
    """The versions of parameters with masters that are costly to follow, as the last step left them."""

    def _name(self, parameter: Tensor, index: int) -> str:
        """The parameter's name in error messages."""
        return f"parameter {index}"

    def _look(self, way: Way, grad: Tensor, grad_scale: float = 1.0) -> None:
        """Call the rule's `look`, if it has one, with a gradient, before any weight is updated."""
        if way.rule.look is not None:
            way.rule.look(self._next(way, grad, grad_scale), lambda: self._name(way.parameter, way.index))

    def _next(self, way: Way, grad: Tensor, grad_scale: float) -> Step:
        """The `Step` of the next update of a parameter."""
        step, number = way.step, int(way.count) + 1
        master: Any = step.master
        if way.noisy:
            seed = derive_seed(way.group["rounding_seed"], number, way.index)
            master = replace(master, seed=seed, positions=positions(way.parameter))
        grad = self.gradient(way, grad)
        return replace(step, grad=grad, master=master, number=number, group=way.group, grad_scale=grad_scale)

    def gradient(self, way: Way, grad: Tensor) -> Tensor:
        """The gradient in the form that the update takes: decoded, and this rank's shard."""
        return grad if way.plain else _gradient(way.parameter, way.rule, way.step.master, grad)

    def way(
        self, parameter: Tensor, group: dict[str, Any], index: int, grad: Tensor, varies: Any, kernels: bool = True
    ) -> Way:
        """How to step a parameter with gradients like `grad`, by a kernel if one applies and `kernels` is True."""
        plan, state = self.plan(parameter, group, varies), self.state[parameter]
        master = plan.master
        if not state.keys() >= plan.held:
            self._begin_state(parameter, plan)
        spread = hasattr(parameter, "device_mesh")
        plain = not spread and not isinstance(parameter, ops.CodeTensor) and not isinstance(grad, ops.CodeTensor)
        # For a sharded parameter, this rank's shards; the gradient stays whole if the rule takes norms of it.
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
        step = Step(weight, master, kept, weight, *rest)  # not the gradient, which could then not be freed
        return Way(parameter, group, index, plan.rule, step, state["step"], fused, plain, noisy)

    def _update(self, way: Way, grad: Tensor, grad_scale: float, numbers: dict[Any, Any]) -> None:
        """Step one parameter; `numbers` caches the step's scalars for parameters of one group (`_numbers`)."""
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
        """Step a batch by one kernel call; one by one if the rule takes norms of tensors, or if step counts differ
        since someone wrote to them."""
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
            seeds = derive_seed(way.group["rounding_seed"], number, batch.indices)
        batch.fused(grads, given.program.element, (given.scale, *given.taken), seeds)
        torch.autograd.graph.increment_version(batch.weights)
        for parameter in batch.costly:
            self.note_written(parameter)

    def follow(self, parameter: Tensor) -> None:
        """Let the master follow its parameter if that was written to since the last step."""
        if self._was_written(parameter):
            master, state = self._master(parameter), self.state[parameter]
            ops.follow(master, local(parameter), {name: local(state[name]) for name in master.keeps})

    def _was_written(self, parameter: Tensor) -> bool:
        return self._versions.get(parameter) != parameter._version

    def note_written(self, parameter: Tensor) -> None:
        """Record the parameter's version after a step."""
        self._versions[parameter] = parameter._version


def _numbers(way: Way, number: int, grad_scale: float, numbers: dict[Any, Any]) -> Any:
    """`UpdateRule.numbers` of a step, cached for all parameters of a group."""
    key = number, id(way.group), id(way.rule)
    if key not in numbers:
        numbers[key] = way.rule.numbers(number, way.group, grad_scale)
    return numbers[key]


def _gradient(parameter: Tensor, rule: UpdateRule, master: Master, grad: Tensor) -> Tensor:
    grad = like(parameter, master.gradient(grad))
    return local(grad) if rule.elementwise else grad


# ---- parameters on a GPU, together -----------------------------------------------------------------------------------

Stepped = tuple[Tensor, Tensor, dict[str, Any], int]
"""A parameter, its gradient, its group and its index."""

_version = attrgetter("_version")


class StepPlan:
    """The plan of an optimizer's step: the tensors on a GPU that kernels step together, by a few launches, and how each
    other parameter is stepped.

    It is reused until something changes: which parameters, gradients or states there are, their addresses, or the kind
    of options. Checking that compares lists of addresses. If all parameters are stepped together, the host never waits
    for the GPU.
    """

    def __init__(self, anywhere: bool = False) -> None:
        self._anywhere = anywhere
        """Whether tensors may be on a CPU, as for Triton's interpreter."""
        self._steps: dict[torch.device, Steps] = {}
        self._held: list[Steps] = []
        """Earlier steps that CUDA graphs still read."""
        self._forget()

    def _forget(self) -> None:
        for steps in self._steps.values():
            if steps.held:
                self._held.append(steps)
        self._steps = {}
        self.ways: list[Way] = []
        """The parameters that GPU kernels do not step."""
        self.batches: list[Batch] = []
        """The items of `ways` that CPU kernels step together."""
        self.alone: list[Way] = []
        """The others of `ways`."""
        self.looking: list[Way] = []
        """The items of `ways` whose update rule has a `look`."""
        self._weights: list[Tensor] = []
        self._followed: list[Tensor] = []
        """Parameters whose masters must follow if they were written to."""
        self._left: list[int] = []
        """The versions of `_followed` as the last step left them; -1 before the first."""
        self._rounded: list[Tensor] = []
        """Gradients that were rounded for this step alone."""
        self._kinds: list[object] = []
        self._varies: list[Any] = []
        self._rule: UpdateRule | None = None
        self._unmoved: AddressRecord | None = None
        """A record of the last step's tensors; None if the next step must plan again."""

    @property
    def all(self) -> bool:
        """Whether the last step stepped all parameters with a gradient together."""
        return self._unmoved is not None and not self.ways

    def needs_sync(self, number: Any) -> bool:
        """Whether a scalar is on a GPU, so that the host would have to wait to read it."""
        return self._anywhere or getattr(number, "is_cuda", False)

    # ---- a step by the last plan -------------------------------------------------------------------------------

    def reuse(self, owner: Stepping) -> bool:
        """Reuse the plan with the present gradients' addresses and options' values. False if something else has changed
        since the last step."""
        if self._unmoved is None or owner.rule is not self._rule:
            return False
        grads = self._unmoved.gradients(owner.param_groups, owner.state)
        if grads is None or list(map(owner.varies, owner.param_groups)) != self._varies:
            return False
        options = _options(owner) if self._steps else []
        if [own.program for own in options] != self._kinds:
            return False
        for group in owner.param_groups:
            owner.rule.check(group)
        for device, steps in self._steps.items():
            steps.find(*grads[device])
            steps.set(options)
        return True

    def run(self, owner: Stepping, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Step the parameters that GPU kernels step together."""
        written = list(compress(self._followed, map(ne, map(_version, self._followed), self._left)))
        for parameter in written:
            owner.follow(parameter)
        for device, steps in self._steps.items():
            scalars = (None if one is None else one.to(device, torch.float32, non_blocking=True) for one in
                       (grad_scale, found_inf))  # fmt: skip
            steps.run(*scalars)
        if self._weights:
            torch.autograd.graph.increment_version(self._weights)
        self._left = list(map(_version, self._followed))
        for parameter in written:
            owner.note_written(parameter)

    def follow_options(self, owner: Stepping) -> None:
        """Copy the groups' present values, such as learning rates, to where CUDA graphs of steps read them.

        Raises:
            OptimizerError: another option has changed since a capture.
        """
        options = _options(owner)
        for steps in (*self._steps.values(), *self._held):
            if steps.takes(options):
                steps.set(options)
            elif steps.held:
                raise OptimizerError(
                    "the betas of a parameter group, or which options it has, have changed since a step of this "
                    "optimizer was captured in a CUDA graph, which keeps the old ones; restore them, or capture a step "
                    "with the new ones"
                )

    # ---- a new plan ---------------------------------------------------------------------------------------------

    def take(self, owner: Stepping, stepped: Iterable[Stepped], kernels: bool) -> None:
        """Plan how each parameter is stepped, without stepping any.

        Args:
            kernels: whether kernels may step them.

        Raises:
            OptimizerError: a group is `capturable`, and GPU kernels cannot step one of its parameters.
        """
        self._forget()
        self._varies = list(map(owner.varies, owner.param_groups))
        options: list[Options] = []
        numbers = dict(zip(map(id, owner.param_groups), count(), strict=False))
        by_device: dict[torch.device, list[Tensors]] = {}
        read: dict[Tensor, Tensor | Coded | None] = {}
        launched: set[Tensor] = set()
        for parameter, grad, group, index in stepped:
            number = numbers[id(group)]
            (rule, _), _ = self._varies[number]
            on_gpu = kernels and rule.options is not None and (self._anywhere or parameter.is_cuda)
            options = _options(owner) if on_gpu and not options else options
            way = owner.way(parameter, group, index, grad, self._varies[number], kernels and not on_gpu)
            own = self._tensors(owner, way, grad, number, options[number].program) if on_gpu else None
            if own is None or kind_of(own, options[own.group]) is None:
                if group.get("capturable"):
                    raise OptimizerError(_NOT_CAPTURABLE.format(index, tuple(parameter.shape), parameter.dtype))
                if on_gpu and kernels:
                    way = owner.way(parameter, group, index, grad, self._varies[number])
                self.ways.append(way)
                if way.rule.look is not None:
                    self.looking.append(way)
                read[parameter] = None if way.fused is None else grad if way.plain else owner.gradient(way, grad)
                continue
            state, device = owner.state[parameter], codes_of(own.weight).device
            if state["step"].device != device:
                state["step"] = state["step"].to(device, torch.float32, non_blocking=True)
            read[parameter] = own.grad
            launched.add(parameter)
            by_device.setdefault(device, []).append(own._replace(step=state["step"]))
            if isinstance(own.weight, Coded) and own.kept:
                self._followed.append(parameter)
            self._weights += [part(parameter), parameter] if is_spread(parameter) else [parameter]
        self.batches, self.alone = batched(self.ways)
        for device, tensors in by_device.items():
            self._steps[device] = Steps(tensors, options)
        self._kinds = [own.program for own in options] if self._steps else []
        self._rule = owner.rule
        self._left = [-1] * len(self._followed)
        if read and kernels and not self._rounded and (self._steps or not hasattr(next(iter(read)), "fake_mode")):
            self._unmoved = AddressRecord(owner.param_groups, owner.state, read, launched)

    def _tensors(self, owner: Stepping, way: Way, grad: Tensor, number: int, program: Program) -> Tensors | None:
        """The tensors of a parameter for a GPU kernel; None if no kernel applies."""
        rule, step, parameter, group = way.rule, way.step, way.parameter, way.group
        weight, codes = _of_group(step.weight), _of_group(grad)
        if rule is not owner.rule.of(group) or weight is None or codes is None:
            return None
        lies = codes_of(weight)
        if not (self._anywhere or plain(lies, lies.dtype)):
            return None
        moments = with_codes(step.moments, step.kinds, step.weight)
        names, read = program.moments, owner.gradient(way, grad)
        shared = [moments.pop(name) for name in program.shared]
        residual = moments.pop(f"{names[-1]}_residual", None) if names else None
        if moments.keys() != set(names) or not isinstance(residual, Tensor | None):
            return None
        place, master = None, step.master
        kept: dict[str, Tensor | Coded] = {**step.kept}
        if is_spread(parameter) and master.rounding == "stochastic":
            place = run_of(parameter)
            if place is None:
                return None
        if isinstance(master, CodedWeight):
            if master.codes.master is not None:
                kept = with_codes(step.kept, {MASTER: master.codes.master}, step.weight)
            if isinstance(codes, Tensor) and master.codes.grads is not None:
                self._rounded.append(read)
        return Tensors(
            weight, codes if isinstance(codes, Coded) else read, way.count, master.name,
            kept, tuple(moments[name] for name in names), residual, master.rounding, place, group["rounding_seed"],
            way.index, number, tuple(t for t in shared if isinstance(t, Tensor)),
        )  # fmt: skip


def _of_group(tensor: Tensor) -> Tensor | Coded | None:
    """A weight or gradient as kernels take it: a CodeTensor as `Coded`; None for a view of a CodeTensor's part."""
    if not isinstance(tensor, CodeTensor):
        return tensor
    return Coded(tensor.quantizer, tensor.parts, tuple(tensor.shape)) if tensor.is_whole else None


_NOT_CAPTURABLE = (
    "parameter {} of shape {} and dtype {} is in a group with capturable=True, and no kernel steps it on its device "
    "without the host: the update would read its step count there. Put it in a group of its own with capturable=False"
)


def _options(owner: Stepping) -> list[Options]:
    made = [(owner.rule.of(group).options, group) for group in owner.param_groups]
    return [_STILL if options is None else options(group) for options, group in made]


_STILL = Options(Program((), (), (), NOTHING, NOTHING), 1.0, (), lambda step, settings: {}, ())
"""Placeholder options for the table's row of a group that no kernel steps."""
