"""An optimizer's tensors on a GPU stepped together, by a few launches: which they are, and whether all is as before."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import attrgetter, ne
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.kernels.cpu.coded import Coded
from halfstep.kernels.gpu.kinds import Options, Tensors, codes_of, takes
from halfstep.kernels.gpu.launch import plain
from halfstep.kernels.gpu.optimizer import Steps
from halfstep.ops import CodeTensor
from halfstep.optim.coded import CodedWeight
from halfstep.optim.rules.base import Step, UpdateRule, as_kept, with_codes
from halfstep.optim.shards import is_spread, part, run_of
from halfstep.optim.unmoved import Unmoved
from halfstep.recipe import MASTER


Stepped = tuple[Tensor, Tensor, dict[str, Any], int]
"""A parameter, its gradient, its group and its number."""

_version = attrgetter("_version")


class Owner(Protocol):
    """What is asked of the optimizer."""

    rule: UpdateRule
    param_groups: list[dict[str, Any]]
    state: Any

    def taken(self, parameter: Tensor, group: dict[str, Any], grad: Tensor) -> tuple[UpdateRule, Step]:
        """The rule that a parameter is updated by, and what the update takes; not yet of which step it is."""

    def follow(self, parameter: Tensor) -> None:
        """Let what is kept of a parameter follow it, if somebody may have written to it since the last step."""

    def note_written(self, parameter: Tensor) -> None:
        """A parameter is as a step left it."""


class Together:
    """The tensors of an optimizer that kernels step together, and where these are in memory.

    A step that finds all of it where it was, with options of the same kind, is a list of addresses compared and a few
    launches: nothing else is looked at again, and nothing waits for the GPU.
    """

    def __init__(self, anywhere: bool = False) -> None:
        self._anywhere = anywhere
        """Whether tensors need not be on a GPU: Triton's interpreter has them on a CPU."""
        self._steps: dict[torch.device, Steps] = {}
        self._held: list[Steps] = []
        """What CUDA graphs still read."""
        self._forget()

    def _forget(self) -> None:
        self._held += [steps for steps in self._steps.values() if steps.held]
        self._steps = {}
        self._weights: list[Tensor] = []
        self._followed: list[Tensor] = []
        """Parameters whose masters follow where somebody has written."""
        self._left: list[int] = []
        """Their versions as the last step left them; -1 before one."""
        self._rounded: list[Tensor] = []
        """Gradients that were rounded for this step alone."""
        self._kinds: list[object] = []
        self._rule: UpdateRule | None = None
        self._unmoved: Unmoved | None = None
        """Where the last step found everything; None where it did not take all that had a gradient."""

    @property
    def all(self) -> bool:
        """Whether the last step took all that had a gradient."""
        return self._unmoved is not None

    def serves(self, owner: Owner) -> bool:
        """Whether some of these tensors may be stepped together, so that what is on the GPU is not asked for."""
        if owner.rule.options is None:
            return False
        return self._anywhere or any(p.is_cuda for group in owner.param_groups for p in group["params"])

    # ---- a step like the last one ------------------------------------------------------------------------------

    def again(self, owner: Owner, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Take a step like the last one. False where something other than numbers has changed, or not all was stepped
        so: then nothing has moved."""
        if self._unmoved is None or owner.rule is not self._rule:
            return False
        grads = self._unmoved.gradients(owner.param_groups, owner.state)
        if grads is None:
            return False
        options = _options(owner)
        if [own.kind for own in options] != self._kinds:
            return False
        for group in owner.param_groups:
            owner.rule.check(group)
        for device, steps in self._steps.items():
            steps.find(*grads[device])
            steps.set(options)
        self.run(owner, grad_scale, found_inf)
        return True

    def run(self, owner: Owner, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Step all that `take` took."""
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

    # ---- a step that is not -------------------------------------------------------------------------------------

    def take(self, owner: Owner, stepped: Iterable[Stepped]) -> list[Stepped]:
        """Find what `run` can step, which is not stepped yet; and return the rest.

        Raises:
            OptimizerError: a group is `capturable`, and one of its parameters is among the rest.
        """
        self._forget()
        if owner.rule.options is None:
            return list(stepped)
        options, numbers = _options(owner), {id(group): i for i, group in enumerate(owner.param_groups)}
        by_device: dict[torch.device, list[Tensors]] = {}
        taken: dict[Tensor, Tensors] = {}
        rest = []
        for parameter, grad, group, index in stepped:
            own = self._tensors(owner, parameter, grad, group, index, numbers[id(group)])
            if own is None or not takes(own, options[own.group]):
                if group.get("capturable"):
                    raise OptimizerError(_NOT_CAPTURABLE.format(index, tuple(parameter.shape), parameter.dtype))
                rest.append((parameter, grad, group, index))
                continue
            state, device = owner.state[parameter], codes_of(own.weight).device
            if state["step"].device != device:
                state["step"] = state["step"].to(device, torch.float32, non_blocking=True)
            taken[parameter] = own = own._replace(step=state["step"])
            by_device.setdefault(device, []).append(own)
            if isinstance(own.weight, Coded) and own.kept:
                self._followed.append(parameter)
            self._weights += [part(parameter), parameter] if is_spread(parameter) else [parameter]
        self._steps = {device: Steps(tensors, options) for device, tensors in by_device.items()}
        self._kinds, self._rule = [own.kind for own in options], owner.rule
        self._left = [-1] * len(self._followed)
        if taken and not rest and not self._rounded:
            self._unmoved = Unmoved(owner.param_groups, owner.state, taken)
        return rest

    def _tensors(
        self, owner: Owner, parameter: Tensor, grad: Tensor, group: dict[str, Any], index: int, number: int
    ) -> Tensors | None:
        """What is read of a parameter; None where no kernel would."""
        rule, step = owner.taken(parameter, group, grad)
        weight, codes = _numbers(step.weight), _numbers(grad)
        if rule is not owner.rule or weight is None or codes is None:
            return None
        lies = codes_of(weight)
        if not (self._anywhere or plain(lies, lies.dtype)):
            return None
        names, moments = rule.moments(group), as_kept(step)
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
                self._rounded.append(step.grad)
        return Tensors(
            weight, codes if isinstance(codes, Coded) else step.grad, owner.state[parameter]["step"], master.name,
            kept, tuple(moments[name] for name in names), residual, master.rounding, place, group["rounding_seed"],
            index, number,
        )  # fmt: skip


def _numbers(tensor: Tensor) -> Tensor | Coded | None:
    """A weight or a gradient as kernels take it; None of a part of codes."""
    if not isinstance(tensor, CodeTensor):
        return tensor
    return Coded(tensor.quantizer, tensor.parts, tuple(tensor.shape)) if tensor.is_whole else None


_NOT_CAPTURABLE = (
    "parameter {} of shape {} and dtype {} is in a group with capturable=True, and no kernel steps it on its device "
    "without the host: the update would read its step count there. Put it in a group of its own with capturable=False"
)


def _options(owner: Owner) -> list[Options]:
    assert owner.rule.options is not None
    return [owner.rule.options(group) for group in owner.param_groups]
