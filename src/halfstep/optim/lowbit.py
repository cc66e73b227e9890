"""`LowBit`: one optimizer for all update rules and storage formats: decode, update in float32, round, write."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.errors import OptimizerError
from halfstep.optim.checks import (
    NO_GRADIENT,
    UNSCALED,
    check_new_group,
    check_parameters,
    check_step,
    params_of,
    warn_of_late,
)
from halfstep.optim.gradients import narrow_all
from halfstep.optim.present import Present, Reference
from halfstep.optim.rules import UpdateRule
from halfstep.optim.shards import are_several, first_ranks
from halfstep.optim.stepping import Stepping, StepPlan
from halfstep.optim.update import Update
from halfstep.quant.tracing import untraced
from halfstep.recipe import Projection, Recipe


class _Bytes(NamedTuple):
    """An FP8 tensor as bytes, for pickles: torch's legacy loader has no FP8 storages."""

    bytes: Tensor
    dtype: torch.dtype


def _pickled(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.itemsize == 1 and value.is_floating_point()
    return _Bytes(value.view(torch.uint8), value.dtype) if narrow else value


class LowBit(Stepping):
    """An update rule over weights and moments stored in few bits, with torch.optim's semantics.

    Each step decodes weight, gradient and moments to float32, applies the rule, and rounds each result once to its own
    format. If there are master weights, they are updated and the weight is the rounded master. If a weight was written
    to from outside, in whatever way, its master follows (`masters.Master`).

    It follows torch's protocol for loss scaling (`grad_scale` and `found_inf`, like the fused optimizers), so the
    gradient is divided by the scale in float32, inside the update: fp16 gradients are never unscaled in place, which
    would flush small ones to zero. It works with `torch.amp.GradScaler` and `halfstep.LossScaler`.

    The state of a parameter: `step`, the rule's moments under torch's names, and the tensors of its master. It is
    saved, loaded, copied and pickled as in torch's optimizers.

    Args:
        model, process_group: as for `convert`.
        projections: the projections of parameters that are updated in a subspace.
    """

    _step_supports_amp_scaling = True
    takes_float32_gradients = True  # of 16-bit parameters too, for a loss scaler to unscale and clip in float32
    per_layer: Any = None
    """The `PerLayer` by which it steps in the backward pass, if any."""
    check_new: Callable[[Collection[Tensor]], None] | None = None
    """A function that raises for parameters of the model that are not stored as the recipe says."""
    check_reduced: Callable[[], None] | None = None
    """A function that raises, before a step, if ranks have not averaged gradients as the recipe says."""
    reduced: Sequence[Tensor] = ()
    """All parameters with gradients on this rank, if other ranks step some of them (`distributed.Dealt`)."""
    awaits_scaler = False
    """Whether the recipe scales its loss and no scaler was used yet: a step without one warns, once."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        recipe: Recipe,
        seed: int,
        model: Reference | None = None,
        process_group: Any = None,
        projections: Mapping[Any, Projection] | None = None,
    ) -> None:
        self._present = Present(model, groups) if model is not None else None
        self._process_group = process_group
        self._agreed = False
        self._versions: dict[Tensor, int] = {}
        self._watch: Callable[[Update], None] | None = None
        self._together = StepPlan()
        super().__init__(groups, rule, recipe, {"rounding_seed": seed}, projections)

    @contextmanager
    def watched(self, watch: Callable[[Update], None]) -> Iterator[None]:
        """A context in which `watch` is called with every update. Updates then take the reference path, which is equal
        and slower."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def _name(self, parameter: Tensor, index: int) -> str:
        name = self._present.name(parameter) if self._present is not None else None
        return f"parameter {index}" + (f" ({name})" if name else "")

    def __getstate__(self) -> dict[str, Any]:
        # A copy has neither the reference to the model nor the process group.
        own = {name: getattr(self, name) for name in ("rule", "recipe", "awaits_scaler", "origin")}
        held = set(self._parameters())
        own["projections"] = {p: projection for p, projection in self.projections.items() if p in held}
        made = {**super().__getstate__(), **own}
        kept = made["state"] = type(self.state)(dict)
        for parameter, state in self.state.items():
            kept[parameter] = {name: _pickled(value) for name, value in state.items()}
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's load_state_dict calls this too, with fewer entries than a copy has.
        absent: dict[str, Any] = {"_watch": None, "_present": None, "_process_group": None, "projections": {}}
        begun = {
            "_agreed": False,
            "_versions": {},
            "_plans": {},
            "_labels": {},
            "per_layer": self.per_layer,
            "_together": StepPlan(),
        }
        super().__setstate__({**absent, **vars(self), **begun, **state})
        for own in self.state.values():
            own.update({name: value.bytes.view(value.dtype) for name, value in own.items() if type(value) is _Bytes})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the recipe applies to the new parameters too.

        Raises:
            OptimizerError: a parameter has a dtype that no recipe stores, or belongs to an adapter, is not float32, and
                the recipe stores adapters in float32; or the optimizer combines several, and the group names none of
                their rules or lacks options. Nothing was added.
        """
        if self.rule.parts:
            check_new_group(param_group, self.param_groups, self.rule, self.defaults)
        super().add_param_group(param_group)
        try:
            check_parameters(self.param_groups, self._name)
            if self.check_new is not None:
                self.check_new(self.param_groups[-1]["params"])
        except OptimizerError:
            self.param_groups.pop()
            raise
        self._known = len(self._parameters())

    def agree_on_the_seed(self) -> None:
        """Take the seed of stochastic rounding from the first rank of the process group, once."""
        if self._agreed or self.recipe.update_rounding != "stochastic" or not are_several(self._process_group):
            return
        own, self._agreed = self.defaults["rounding_seed"], True
        self.defaults["rounding_seed"] = seed = first_ranks(own, self._process_group)
        for group in self.param_groups:
            if group["rounding_seed"] == own:  # not a loaded one
                group["rounding_seed"] = seed

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, once.

        Raises:
            OptimizerError: a gradient is sparse; the model's parameters were replaced; or there is no gradient, and
                weights are codes, which no other optimizer can step. Nothing was changed.
        """
        if self._present is not None:
            self._present.check(self.param_groups)
        if self.check_reduced is not None and closure is None:
            self.check_reduced()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if self.check_reduced is not None:
                self.check_reduced()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.awaits_scaler:
            self.awaits_scaler = False
            if found_inf is None and scale is None:
                warnings.warn(UNSCALED, stacklevel=4)  # torch wraps step, twice
        together = self._together
        if found_inf is not None and not together.needs_sync(found_inf):
            if float(found_inf):
                return loss
            found_inf = None
        if self._watch is not None or not together.reuse(self):
            self._plan_step()
        ways = together.ways
        if ways and found_inf is not None and float(found_inf):
            return loss
        grad_scale = 1.0 if scale is None or not ways else 1.0 / float(scale)
        # In case the loop runs under autocast: update in float32, and drop cached casts of weights afterwards.
        with torch.autocast(ways[0].parameter.device.type if ways else "cpu", enabled=False):
            for way in together.looking:
                self._look(way, way.parameter.grad, grad_scale)
            together.run(self, scale, found_inf)
            numbers: dict[Any, Any] = {}
            for batch in together.batches:
                self._update_batch(batch, grad_scale, numbers)
            for way in together.alone:
                self._update(way, way.parameter.grad, grad_scale, numbers)
        torch.clear_autocast_cache()
        return loss

    def _plan_step(self) -> None:
        """Decide how each parameter with a gradient is stepped, until a tensor or option changes.

        Raises:
            OptimizerError: as `step`.
        """
        stepped, numbers = list[Any](), count()
        for group in self.param_groups:
            for parameter, index in zip(group["params"], numbers, strict=False):
                if parameter.grad is not None:
                    stepped.append((parameter, parameter.grad, group, index))
        self.check()
        if not stepped and self.per_layer is None and self._parameters():
            if self.recipe.codes is not None:
                raise OptimizerError(NO_GRADIENT)
            warnings.warn(NO_GRADIENT, stacklevel=5)
        if self.recipe.master is not None or self.recipe.codes is not None:
            self._start_late()
        self._together.take(self, stepped, kernels=self._watch is None)

    def check(self) -> None:
        """Check parameters, gradients and options before a step.

        Raises:
            OptimizerError: as `step`.
        """
        for group in self.param_groups:
            group.setdefault("rounding_seed", self.defaults["rounding_seed"])  # a group added to the old optimizer
        check_parameters(self.param_groups, self._name)
        held = self._parameters()
        if self._present is not None:
            self._present.check_shapes(held)
        if self.check_new is not None and len(held) != self._known:
            self.check_new(held)  # parameters added to the old optimizer
            self._known = len(held)
        check_step(self.param_groups, self.rule, self._name)
        self.agree_on_the_seed()
        self._name_formats()

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(map(params_of, self.param_groups)))

    def _start_late(self) -> None:
        """Start the masters of parameters that were frozen, or not in the optimizer, when the others' were taken; warn
        once."""
        late = []
        for index, parameter in enumerate(self._parameters()):
            master = self._master(parameter)
            if parameter.grad is None or master.keeps.keys() <= self.state.get(parameter, {}).keys():
                continue
            self._start(parameter, None)
            late.append(f"{self._name(parameter, index)} of shape {tuple(parameter.shape)}")
        if late:
            warn_of_late(late)

    # ---- for CUDA graphs of steps --------------------------------------------------------------------------------

    @property
    def steps_all_together(self) -> bool:
        """Whether GPU kernels stepped all parameters of the last step without a read by the host."""
        return self._together.all

    def follow_options(self) -> None:
        """`Together.follow_options`: update the options that CUDA graphs read."""
        self._together.follow_options(self)

    # ---- one parameter at a time, for `PerLayer` -----------------------------------------------------------------

    def project_gradient(self, parameter: Tensor, group: dict[str, Any], index: int, first: bool) -> Tensor | None:
        """A micro-batch's gradient projected to its subspace, which the first one chooses if due; None if the parameter
        is not projected."""
        if self.plan(parameter, group).rule.lower is None or parameter.grad is None:
            return None
        way = self.way(parameter, group, index, parameter.grad, self.varies(group), kernels=False)
        if first:
            self._look(way, parameter.grad)
        assert way.rule.lower is not None
        return way.rule.lower(self._next(way, parameter.grad, 1.0))

    def step_on(self, parameter: Tensor, group: dict[str, Any], index: int, grad: Tensor) -> None:
        """Update one parameter by a gradient, or by a sum of results of `project_gradient`."""
        if not self._master(parameter).keeps.keys() <= self.state.get(parameter, {}).keys():
            self._start_late()
        way = self.way(parameter, group, index, grad, self.varies(group))
        if grad.shape == parameter.shape:
            self._look(way, grad)
        self._update(way, grad, 1.0, {})

    @property
    def several_ranks(self) -> bool:
        """Whether several processes train together."""
        return are_several(self._process_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; parameters whose gradients became float32 by unscaling get their own gradient dtype back."""
        super().zero_grad(set_to_none)
        held = set(self._parameters()) if self.reduced else ()
        for parameter in self.reduced:
            if parameter not in held:
                parameter.grad = None
        narrow_all(self)
        if self.per_layer is not None:
            self.per_layer.drop()
