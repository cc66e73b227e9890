"""One optimizer for every update rule and every storage format: decode, update in float32, round, write."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import ops
from halfstep.errors import OptimizerError
from halfstep.ops import CodeTensor
from halfstep.optim.checks import UNSCALED, check_parameters, check_state, check_step, warn_of_late
from halfstep.optim.coded import CodedWeight
from halfstep.optim.gradients import narrow_all
from halfstep.optim.present import Present, Reference
from halfstep.optim.rules.base import Step, UpdateRule
from halfstep.optim.seeds import are_several, first_ranks
from halfstep.optim.shards import is_spread, like, local, placed, positions, spread_like
from halfstep.optim.states import FORMATS, Kinds, adopt, foreign, kinds_of, labels, start, widened
from halfstep.optim.update import OWN, Update, move
from halfstep.quant import derive_seed
from halfstep.quant.masters import Master, get_master
from halfstep.recipe import MASTER, Recipe, Storage


class LowBit(torch.optim.Optimizer):
    """An update rule over weights and moments stored in few bits, with torch.optim's semantics.

    Each step decodes weight, gradient and moments to float32, applies the rule, and rounds each result once to
    its own format. Where there is a master copy, it takes the update and the weight is its rounded image. A weight that
    somebody wrote to, in whatever way, is followed by what is kept of it (`masters.Master`).

    It follows torch's protocol for loss scaling (`grad_scale` and `found_inf`, as the fused optimizers do), so the
    gradient is divided by the scale in float32, inside the update: fp16 gradients are never unscaled in place, which
    would flush the small ones. `torch.amp.GradScaler` works with it as well as `halfstep.LossScaler`.

    State a parameter: `step`, the rule's moments under torch's names, and what the recipe's master keeps. It is saved,
    loaded, copied and pickled like that of torch's optimizers.

    Args:
        model, process_group: as for `convert`.
    """

    _step_supports_amp_scaling = True
    takes_float32_gradients = True  # also of parameters in 16 bits: a loss scaler unscales and clips them there
    awaits_scaler = False
    """Whether the recipe scales its loss and no scaler has been seen yet: a step without one warns, once."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        recipe: Recipe,
        seed: int,
        model: Reference | None = None,
        process_group: Any = None,
    ) -> None:
        self.rule = rule
        self.recipe = recipe
        self._present = Present(model) if model is not None else None
        self._process_group = process_group
        self._agreed = False
        self._versions: dict[Tensor, int] = {}
        self._watch: Callable[[Update], None] | None = None
        self._known_kinds: dict[Any, Kinds] = {}
        super().__init__(groups, {"rounding_seed": seed})

    @contextmanager
    def watched(self, watch: Callable[[Update], None]) -> Iterator[None]:
        """While this lasts, `watch` is told of every update, which then takes the reference path: equal, and slower."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @torch.no_grad()
    def full(self, parameter: Tensor) -> Tensor:
        """All that is stored of a parameter, its master included, as a float32 tensor of its own."""
        master, state, weight = self._master(parameter), self.state.get(parameter, {}), local(parameter.detach())
        if not master.keeps or not master.keeps.keys() <= state.keys():
            return spread_like(master.stored(weight), parameter)
        kept = {name: local(state[name]).clone() for name in master.keeps}
        ops.follow(master, weight, kept)
        return spread_like(master.value(weight, kept), parameter)

    def _start(self, parameter: Tensor, full: Tensor | None) -> None:
        """Start what is kept of a parameter from its float32 values, or from what is stored of it."""
        master, weight = self._master(parameter), local(parameter)  # torch's views of a DTensor's bits are wrong
        kept = master.start(weight, master.stored(weight) if full is None else local(full))
        self.state[parameter].update({name: spread_like(value, parameter) for name, value in kept.items()})

    def _master(self, weight: Tensor) -> Master:
        """What takes the weight's update."""
        if isinstance(weight, CodeTensor):
            assert self.recipe.codes is not None
            return CodedWeight("codes", self.recipe.codes)
        name = None if weight.dtype == torch.float32 else self.recipe.master
        return OWN if name is None else get_master(name)

    def _master_kind(self, weight: Tensor) -> dict[str, Storage]:
        """How the master of a weight that is codes is kept, if it has one."""
        codes = self.recipe.codes
        return {MASTER: codes.master} if codes and codes.master and isinstance(weight, CodeTensor) else {}

    def _name(self, parameter: Tensor, index: int) -> str:
        name = self._present.name(parameter) if self._present is not None else None
        return f"parameter {index}" + (f" ({name})" if name else "")

    def __getstate__(self) -> dict[str, Any]:
        # What a copy needs beside torch's own. Which model it belongs to and who trains with it, it does not know.
        own = {"rule": self.rule, "recipe": self.recipe, "awaits_scaler": self.awaits_scaler}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        absent: dict[str, Any] = {"_watch": None, "_present": None, "_process_group": None, "_agreed": False}
        super().__setstate__({**absent, "_versions": {}, "_known_kinds": {}, **state})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; the recipe holds for the new parameters too.

        Raises:
            OptimizerError: one is of a dtype that no recipe stores. Nothing was added.
        """
        super().add_param_group(param_group)
        try:
            check_parameters(self.param_groups, self._name)
        except OptimizerError:
            self.param_groups.pop()
            raise

    def agree_on_the_seed(self) -> None:
        """Take the seed of stochastic rounding from the first of the processes that train together, once."""
        if self._agreed or self.recipe.update_rounding != "stochastic" or not are_several(self._process_group):
            return
        own, self._agreed = self.defaults["rounding_seed"], True
        self.defaults["rounding_seed"] = seed = first_ranks(own, self._process_group)
        for group in self.param_groups:
            if group["rounding_seed"] == own:  # not a loaded one
                group["rounding_seed"] = seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Raises:
            OptimizerError: a gradient is sparse; parameters of the optimizer have left the model and others have come;
                there is no gradient, and weights are codes that nobody else may step on. Nothing has moved.
        """
        if self._present is not None:
            self._present.check(self.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if self.awaits_scaler:
            self.awaits_scaler = False
            if found_inf is None and not hasattr(self, "grad_scale"):
                warnings.warn(UNSCALED, stacklevel=4)  # torch wraps step, twice
        if found_inf is not None and float(found_inf):
            return loss
        scale = getattr(self, "grad_scale", None)
        grad_scale = 1.0 if scale is None else 1.0 / float(scale)
        if self.recipe.codes is not None and not any(
            p.grad is not None for group in self.param_groups for p in group["params"]
        ):
            raise OptimizerError(
                "no parameter of this optimizer has a gradient. A model that fully_shard or a copy took over has other "
                "parameters; under FSDP2 call halfstep.apply, shard, and build torch's optimizer on what came out"
            )
        for group in self.param_groups:
            group.setdefault("rounding_seed", self.defaults["rounding_seed"])  # it came by way of the old optimizer
        check_parameters(self.param_groups, self._name)
        check_step(self.param_groups, self.rule, self._name)
        self.agree_on_the_seed()
        self._name_formats()
        self._start_late()
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, grad_scale, index)
                index += 1
        return loss

    def _kinds(self, names: tuple[str, ...], parameter: Tensor | None) -> Kinds:
        """How the moments of those names are kept: of this parameter, or of a large one."""
        key = (names, parameter is None or (parameter.numel(), placed(parameter)))
        if key not in self._known_kinds:
            self._known_kinds[key] = kinds_of(self.recipe, names, parameter)
        return self._known_kinds[key]

    def _name_formats(self) -> None:
        """Let the groups, which are saved, say how moments that are codes are kept."""
        for group in self.param_groups:
            formats = labels(self._kinds(self.rule.moments(group), None)[0])
            if self.recipe.codes is not None and self.recipe.codes.master is not None:
                for parameter in group["params"]:
                    formats |= labels(self._master_kind(parameter))
            if formats:
                group[FORMATS] = formats
            else:
                group.pop(FORMATS, None)

    def _start_late(self) -> None:
        """Start the masters of parameters that were frozen, or not here, when the others' were taken; say it, once."""
        late, parameters = [], [p for group in self.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            master = self._master(parameter)
            if parameter.grad is None or master.keeps.keys() <= self.state.get(parameter, {}).keys():
                continue
            self._start(parameter, None)
            late.append(f"{self._name(parameter, index)} of shape {tuple(parameter.shape)}")
        if late:
            warn_of_late(late)

    def _begun(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The parameter's state, with a step count and moments of zero where there are none yet."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name, kind in self._kinds(self.rule.moments(group), parameter)[0].items():
            if state.get(name) is None:
                state.update(start(kind, name, parameter))
        return state

    def _begin(self) -> None:
        """Begin the states of all parameters that are trained. torch.distributed.checkpoint loads into states that are
        there: it takes an optimizer with any for one that has all, and makes one without take a step of zeros."""
        self._name_formats()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad or self.state.get(parameter):
                    self._begun(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any], grad_scale: float, index: int) -> None:
        state, master = self._begun(parameter, group), self._master(parameter)
        kinds, parts, coded = self._kinds(self.rule.moments(group), parameter)
        state["step"] += 1
        number, grad = int(state["step"]), like(parameter, master.gradient(_grad(parameter)))
        # Of a parameter that is spread over ranks, this one's part; whole where norms of the whole enter.
        weight, kept = local(parameter), {name: local(state[name]) for name in master.keeps}
        moments = {part: state[part] for part in parts}
        if self.rule.elementwise:
            grad, moments = local(grad), {name: local(value) for name, value in moments.items()}
        if master is OWN and self.recipe.update_rounding != "nearest_even":
            master = replace(OWN, rounding=self.recipe.update_rounding)
            if master.rounding == "stochastic":
                seed = derive_seed(group["rounding_seed"], number, index)
                master = replace(master, seed=seed, positions=positions(parameter))
        step = Step(weight, master, kept, grad, moments, number, group, grad_scale, kinds, coded)
        if self._watch is None and self.rule.fused(step):
            torch.autograd.graph.increment_version(weight)
        else:
            written = not master.costly or self._versions.get(parameter) != parameter._version
            move(self.rule, step, parameter, written, self._watch)
        if is_spread(parameter):
            torch.autograd.graph.increment_version(parameter)
        if master.costly:
            self._versions[parameter] = parameter._version

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that a clip moved to float32 are of their own dtype again."""
        super().zero_grad(set_to_none)
        narrow_all(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class, or of the torch optimizer with the same rule, returned.

        Moments and masters keep this optimizer's own dtypes: torch's loader would cast them to the parameter's.
        A master copy that the state lacks (a torch optimizer has none) is the present one.

        Raises:
            OptimizerError: the groups differ; a state belongs to a parameter of another shape, or holds what this
                optimizer would leave unused (AMSGrad's maximum, another recipe's master). Nothing was changed.
        """
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if saved != own:
            raise OptimizerError(
                f"the state holds parameter groups of sizes {saved}, this optimizer has {own}; "
                "build the optimizer over the same parameters first"
            )
        states: dict[Tensor, dict[str, Any]] = {}
        for group, mine in zip(state_dict["param_groups"], self.param_groups, strict=True):
            self.rule.check(group)
            for number, parameter in zip(group["params"], mine["params"], strict=True):
                if number in state_dict["state"]:
                    saved_state, options = state_dict["state"][number], {**mine, **group}
                    states[parameter] = self._adopt(parameter, saved_state, options, number, group.get(FORMATS))
        groups = self.param_groups
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups  # the same objects: a scheduler built before `convert` holds them
        self.state.update(states)
        self._begin()

    @torch.no_grad()
    def _adopt(
        self,
        parameter: Tensor,
        saved: Mapping[str, Any],
        group: Mapping[str, Any],
        number: object,
        formats: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """A parameter's saved state in this optimizer's dtypes, with the present master where it has none."""
        master, present = self._master(parameter), self.state.get(parameter, {})
        kinds = self._kinds(self.rule.moments(group), parameter)[0] | self._master_kind(parameter)
        state = adopt(saved, parameter, kinds, (get_master(self.recipe.master), master), formats, number)
        check_state(saved, self.rule, foreign(saved, self.recipe, master))
        if not master.keeps.keys() <= state.keys() and master.keeps.keys() <= present.keys():
            state.update({name: present[name] for name in master.keeps})
        return state

    @torch.no_grad()
    def float32_state_dict(self) -> dict[str, Any]:
        """As `state_dict`, with all moments in float32 and no masters: for torch's optimizer with the same rule, or one
        of ours in another format. What a master has beyond its weight, `full` alone gives.
        """
        saved, found = self.state_dict(), {}
        for group, numbers in zip(self.param_groups, saved["param_groups"], strict=True):
            for number in (FORMATS, "rounding_seed"):
                numbers.pop(number, None)
            for number, parameter in zip(numbers["params"], group["params"], strict=True):
                if number in saved["state"]:
                    kinds = self._kinds(self.rule.moments(group), parameter)[0]
                    found[number] = widened(saved["state"][number], kinds, parameter)
        return {**saved, "state": found}

    @torch.no_grad()
    def take_over(self, states: dict[Tensor, Any], masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Empty a torch optimizer's states into this one, and start masters from float32 values."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in states:
                    self.state[parameter] = self._adopt(parameter, states[parameter], group, "?")
        for parameter, full in masters.items():
            self._start(parameter, full)
        self._begin()
        states.clear()


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
