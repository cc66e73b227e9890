"""One optimizer for every update rule and every storage format: decode, update in float32, round, write."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.errors import OptimizerError
from halfstep.optim.gradients import narrow_all
from halfstep.optim.masters import Kept, Master, Own, get_master
from halfstep.optim.rules import rule_of
from halfstep.optim.rules.base import UpdateRule
from halfstep.optim.scaled import scaled_weight
from halfstep.quant import derive_seed, draw_seed
from halfstep.recipe import STORABLE, Recipe, Scaled


_UNSCALED = (
    "this recipe scales its loss, and this step saw no loss scale: small fp16 gradients were zero before they came. "
    "Drive the loop with the scaler that halfstep.prepare returns: scaler.scale(loss).backward(), "
    "scaler.step(optimizer), scaler.update(); with accelerate or Trainer, set accelerator.scaler to it before "
    "accelerator.prepare. To train without a scale on purpose, use a recipe without ('fp16-mixed-unscaled')"
)
_RESIDUAL = "_residual"  # ends the state's name for what rounding a moment left over


@dataclass(frozen=True)
class Storage:
    """How an optimizer keeps what it keeps."""

    moments: torch.dtype
    residuals: tuple[str, ...]
    """Moments kept as the sum of two numbers of that dtype."""
    master: Master
    update_rounding: str
    scaled: Scaled | None = None
    """How the weights are kept that `LowBit` has scales for."""


@dataclass(frozen=True)
class Update:
    """What one update wanted of a parameter and what became of it, in float32."""

    weight: Tensor
    before: Tensor
    """All that was stored of the weight, its master included."""
    wanted: Tensor
    """The rule's step."""
    effective: Tensor
    """All that is stored of the weight after the step, less what was stored before."""


class LowBit(torch.optim.Optimizer):
    """An update rule over weights and moments stored in few bits, with torch.optim's semantics.

    Each step decodes weight, gradient and moments to float32, applies the rule, and rounds each result once to
    its own format. Where there is a master copy, it takes the update and the weight is its rounded image.

    It follows torch's protocol for loss scaling (`grad_scale` and `found_inf`, as the fused optimizers do), so the
    gradient is divided by the scale in float32, inside the update: fp16 gradients are never unscaled in place, which
    would flush the small ones. `torch.amp.GradScaler` works with it as well as `halfstep.LossScaler`.

    State a parameter: `step`, the rule's moments under torch's names, and what the recipe's master keeps.

    Args:
        scales: of the weights that are kept as codes (`nn.codes.hold`).
    """

    _step_supports_amp_scaling = True
    takes_float32_gradients = True  # also of parameters in 16 bits: a loss scaler unscales and clips them there
    awaits_scaler = False
    """Whether the recipe scales its loss and no scaler has been seen yet."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        storage: Storage,
        seed: int,
        scales: Mapping[nn.Parameter, Tensor | None] | None = None,
    ) -> None:
        super().__init__(groups, {"rounding_seed": seed})
        self.rule = rule
        self.storage = storage
        self._scales: Mapping[Any, Tensor | None] = scales or {}
        self._versions: dict[Tensor, int] = {}
        self._watch: Callable[[Update], None] | None = None

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
        master, state = self._master(parameter), self.state[parameter]
        if not master.keeps or not master.keeps.keys() <= state.keys():
            return master.stored(parameter)
        return master.value(parameter.detach(), {name: state[name] for name in master.keeps})

    def _master(self, weight: Tensor) -> Master:
        """What takes the weight's update."""
        if weight in self._scales:
            assert self.storage.scaled is not None
            return scaled_weight(self.storage.scaled, self._scales[weight])
        return get_master(None) if weight.dtype == torch.float32 else self.storage.master

    def __getstate__(self) -> dict[str, Any]:
        # What a copy needs beside torch's own; `_versions` starts anew, so the copy's masters follow its weights.
        own = {"rule": self.rule, "storage": self.storage, "_scales": self._scales, "_versions": {}, "_watch": None}
        return {**super().__getstate__(), **own}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Raises:
            OptimizerError: a gradient is sparse; there is none, and weights are codes that nobody else may step on.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if self.awaits_scaler:
            self.awaits_scaler = False
            if found_inf is None and not hasattr(self, "grad_scale"):
                warnings.warn(_UNSCALED, stacklevel=4)  # torch wraps step, twice
        if found_inf is not None and float(found_inf):
            return loss
        scale = getattr(self, "grad_scale", None)
        grad_scale = 1.0 if scale is None else 1.0 / float(scale)
        if self._scales and not any(p.grad is not None for group in self.param_groups for p in group["params"]):
            raise OptimizerError(
                "no parameter of this optimizer has a gradient. A model that fully_shard or a copy took over has other "
                "parameters; under FSDP2 call halfstep.apply, shard, and build torch's optimizer on what came out"
            )
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, grad_scale, index)
                index += 1
        return loss

    def _update(self, weight: Tensor, group: dict[str, Any], grad_scale: float, index: int) -> None:
        grad = cast(Tensor, weight.grad)
        if grad.layout != torch.strided:
            raise OptimizerError(
                f"parameter {index} has a {grad.layout} gradient; expected a dense one. "
                "Build its embedding with sparse=False"
            )
        state, storage = self.state[weight], self.storage
        names = self.rule.moments(group)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name in (*names, *(name + _RESIDUAL for name in names if name in storage.residuals)):
            if state.get(name) is None:
                state[name] = torch.zeros_like(weight, dtype=storage.moments)
        master = self._master(weight)
        grad = master.gradient(grad)
        if not master.keeps.keys() <= state.keys():
            state.update(master.start(weight, master.stored(weight)))  # it came with add_param_group
        state["step"] += 1
        step, kept = int(state["step"]), {name: state[name] for name in master.keeps}
        if kept and self._versions.get(weight) != weight._version:
            master.follow(weight, kept)  # somebody wrote to the weight: load_state_dict, a clamp, an average
        if isinstance(master, Own):
            rounding = storage.update_rounding
            seed = derive_seed(group["rounding_seed"], step, index) if rounding == "stochastic" else None
            master = Own("none", rounding, seed)
        moments = {name: value for name, value in state.items() if name.removesuffix(_RESIDUAL) in names}
        if self._watch is None and self.rule.fused(weight, master, kept, grad, moments, step, group, grad_scale):
            torch.autograd.graph.increment_version(weight)
        else:
            self._reference(weight, master, kept, grad, moments, step, group, grad_scale)
        self._versions[weight] = weight._version

    def _reference(
        self,
        weight: Tensor,
        master: Master,
        kept: Kept,
        grad: Tensor,
        moments: dict[str, Tensor],
        step: int,
        group: dict[str, Any],
        grad_scale: float,
    ) -> None:
        """What `rule.fused` does, for any rule, device and format: in torch, but for what it can do in float32."""
        full, before = master.read(weight, kept), master.value(weight, kept) if self._watch else None
        if self._watch is None and self.rule.fused(full, Own("none"), {}, grad, moments, step, group, grad_scale):
            master.write(weight, kept, full)
            return
        updated, new = self.rule.update(full, grad.float() * grad_scale, _decode(moments), step, group)
        for name, moment in new.items():
            moments[name].copy_(moment)
            if name + _RESIDUAL in moments:
                moments[name + _RESIDUAL].copy_(moment - moments[name].float())
        master.write(weight, kept, updated)
        if self._watch is not None and before is not None:
            self._watch(Update(weight, before, updated - full, master.value(weight, kept) - before))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that a clip moved to float32 are of their own dtype again."""
        super().zero_grad(set_to_none)
        narrow_all(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class, or of the torch optimizer with the same rule, returned.

        Moments and masters keep this optimizer's own dtypes: torch's loader would cast them to the parameter's.
        A master copy that the state lacks (a torch optimizer has none) is the present one, brought up to the weight.

        Raises:
            OptimizerError: the groups differ, or a state belongs to a parameter of another shape.
        """
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if saved != own:
            raise OptimizerError(
                f"the state holds parameter groups of sizes {saved}, this optimizer has {own}; "
                "build the optimizer over the same parameters first"
            )
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        states = {
            parameter: self._adopt(parameter, state_dict["state"][number], number)
            for number, parameter in zip(numbers, parameters, strict=True)
            if number in state_dict["state"]
        }
        groups = self.param_groups
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups  # the same objects: a scheduler built before `convert` holds them
        self.state.update(states)

    @torch.no_grad()
    def _adopt(self, parameter: Tensor, saved: dict[str, Any], number: object) -> dict[str, Any]:
        """A parameter's saved state in this optimizer's dtypes, on the parameter's device."""
        state: dict[str, Any] = {}
        master = self._master(parameter)
        keeps = self.storage.master.keeps | master.keeps
        for name, value in saved.items():
            if not isinstance(value, Tensor):
                if value is not None:
                    state[name] = value
            elif name == "step":
                state[name] = value.detach().to("cpu", torch.float32, copy=True)
            elif value.shape != parameter.shape and value.dim():
                raise OptimizerError(
                    f"the state of parameter {number} holds {name} of shape {tuple(value.shape)}, "
                    f"expected {tuple(parameter.shape)}: it belongs to another model"
                )
            else:
                dtype = keeps.get(name, self.storage.moments)
                state[name] = value.detach().to(parameter.device, dtype, copy=True)
                if name in self.storage.residuals and name + _RESIDUAL not in saved:
                    state[name + _RESIDUAL] = (value.to(parameter.device) - state[name].float()).to(dtype)
        if "step" not in state:  # torch.optim.SGD counts no steps: with a momentum there was at least one
            state["step"] = torch.ones((), dtype=torch.float32)
        if not master.keeps.keys() <= state.keys():
            present = self.state[parameter]
            if master.keeps.keys() <= present.keys():
                kept = {name: present[name] for name in master.keeps}
                master.follow(parameter, kept)
            else:
                kept = master.start(parameter, master.stored(parameter))
            state.update(kept)
        return state


def _decode(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rule's moments in float32, each with its residual added."""
    decoded = {name: value.float() for name, value in moments.items() if not name.endswith(_RESIDUAL)}
    return {
        name: value + moments[name + _RESIDUAL].float() if name + _RESIDUAL in moments else value
        for name, value in decoded.items()
    }


def convert(
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    masters: Mapping[nn.Parameter, Tensor],
    generator: torch.Generator | int | None = None,
    scales: Mapping[nn.Parameter, Tensor | None] | None = None,
) -> LowBit:
    """The optimizer that continues `optimizer` under a recipe: same groups, same moments, same step counts.

    The parameter groups are shared, not copied, so a scheduler built on the old optimizer before, or on the new one
    after, sets the learning rate of both. The old one's state moves over and is empty afterwards.

    Args:
        masters: the float32 values of parameters that are stored in fewer bits, taken before they were rounded.
        generator: where the seed of stochastic rounding comes from.
        scales: of the weights that are kept as `recipe.scaled` says.

    Raises:
        OptimizerError: the class or an option cannot be expressed; the optimizer is left as it was.
    """
    rule = rule_of(optimizer)
    master = get_master(recipe.master)
    storage = Storage(STORABLE[recipe.moments], recipe.moment_residuals, master, recipe.update_rounding, recipe.scaled)
    # Drawn only where it is used: a recipe that rounds to nearest leaves the model's dropout masks as they were.
    seed = draw_seed(generator) if recipe.update_rounding == "stochastic" else 0
    result = LowBit(list(optimizer.param_groups), rule, storage, seed, scales)
    result.defaults = {**optimizer.defaults, **result.defaults}
    result.param_groups = optimizer.param_groups
    for group in result.param_groups:
        group.setdefault("rounding_seed", seed)
        for parameter in group["params"]:
            if parameter in optimizer.state:
                result.state[parameter] = result._adopt(parameter, optimizer.state.pop(parameter), "?")
            if parameter in masters:
                with torch.no_grad():
                    result.state[parameter].update(result._master(parameter).start(parameter, masters[parameter]))
    scale = recipe.loss_scale
    result.awaits_scaler = scale is not None and (scale.dynamic or scale.init != 1.0)
    # A scheduler built on the old optimizer asks whether that one has stepped; its steps are the new one's now.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return result
