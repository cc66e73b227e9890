"""Recipes with stages: all stages are applied to a model at once, and it is switched between them in place.

And `Steps`, which advances all that depends on optimizer steps.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import RecipeError
from halfstep.nn import noise
from halfstep.nn.adopt import Applied, InTurn, Members, applied_to, extend, extensions, release
from halfstep.nn.arrangement import Arrangement
from halfstep.nn.scaling import Scalings, attach_rules, detach, detach_rules, ignore, ignored, rules_of
from halfstep.nn.schedule import Schedule
from halfstep.ops.part import ATTRIBUTE, Part, drop_part, own_part, part_of, parts_of
from halfstep.quant.rounding import capturing
from halfstep.quant.scaling import StatefulScaling
from halfstep.recipe import RECIPE, Origin


_STAGED = ("linear", "attention", "saved_codes")
"""The attributes of a module's `Part` that may differ between stages."""


@dataclass(frozen=True)
class Taken:
    """The settings of one module in one stage; its class is the same in all stages."""

    part: dict[str, Any]
    states: dict[str, StatefulScaling]
    """The scaling rules of its states, by the names of their buffers."""


def carry_out_stages(model: nn.Module, arrangements: Sequence[Arrangement]) -> None:
    """Apply several arrangements: each module gets one class for all of them, and the settings of the first."""
    found: dict[nn.Module, list[tuple[tuple[Members, ...], Taken]]] = {module: [] for module in model.modules()}
    names: list[str] = []
    for arrangement in arrangements:
        arrangement.carry_out(model)
        names += [name for name in ignored(model) if name not in names]
        for module, stages in found.items():
            stages.append((extensions(module), Taken(_staged(part_of(module)), rules_of(module))))
        clear(model)
    for module, stages in found.items():
        members, taken = zip(*stages, strict=True)
        shared = members[0]
        while any(stage[: len(shared)] != shared for stage in members):
            shared = shared[:-1]
        rest = tuple(stage[len(shared) :] for stage in members)
        for extension in shared:
            extend(module, extension)
        if any(rest):
            extend(module, InTurn(rest))
        if any(rest) or any(one != taken[0] for one in taken):
            own_part(module).stages = taken
        _take(module, taken[0])
    ignore(model, names)


def check_alike(arrangements: Sequence[Arrangement]) -> None:
    """Check that all stages store the same weights as codes.

    Raises:
        RecipeError: the recipe stores rounded weights as codes, and the stages round different weights.
    """
    first = arrangements[0]
    for other in arrangements[1:]:
        differ = sorted(first.rounded.keys() ^ other.rounded.keys())
        if first.recipe.codes is not None and differ:
            raise RecipeError(
                f"recipe {first.recipe.name!r} keeps the weights that rules round as codes, and its stages round "
                f"others: {', '.join(differ[:3])} is not rounded in all of them. Give all of them "
                "rules for the same layers"
            )


def clear(model: nn.Module) -> None:
    """Remove all that arrangements added to a model's modules."""
    for module in model.modules():
        release(module)
        drop_part(module)
    detach(model)


def _staged(part: Part) -> dict[str, Any]:
    return {name: getattr(part, name) for name in _STAGED}


def _take(module: nn.Module, taken: Taken) -> None:
    if taken.part != _staged(part_of(module)):
        vars(own_part(module)).update(taken.part)
    attach_rules(module, taken.states, next((p.device for p in module.parameters()), torch.device("cpu")))


def _switch(model: nn.Module, stage: int) -> None:
    """Switch a model to a stage of its recipe. Parameters, classes and optimizer states stay."""
    own, applied = own_part(model), applied_to(model)
    assert applied.schedule is not None
    for _, module, part in parts_of(model):
        if part.stages:
            detach_rules(module)
            part.stage = stage
            _take(module, part.stages[stage])
    applied.schedule.stage = stage
    own.applied = replace(applied, autocast=applied.stage.autocast)
    own.following.follow(own.applied)


def applied_in(model: nn.Module) -> Applied | None:
    """The `Applied` record in a model or its wrapper; None if there is none or several."""
    roots = [own.applied for _, _, own in parts_of(model) if own.applied is not None]
    return roots[0] if len(roots) == 1 else None


def schedule_of(model: nn.Module) -> Schedule | None:
    """The schedule in a model or its wrapper; None if it follows no recipe with stages."""
    applied = applied_in(model)
    return None if applied is None else applied.schedule


class Steps:
    """Advances, saves and loads what depends on a model's optimizer steps: scaling states, noise keys, the stage.

    Args:
        process_group: as for `Scalings`.
        origin: the recipe that the saved state names.
    """

    def __init__(self, model: nn.Module, process_group: Any = None, origin: Origin | None = None) -> None:
        self._model = model
        self._origin = origin
        self._made = 0  # optimizer steps
        self._scalings = Scalings(model, process_group)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count that optimizer's steps: a step before the last one was ended raises."""
        self._scalings.follow(optimizer)

    def advance(self, skipped: bool | Tensor = False) -> None:
        """End an optimizer step; if it was the last one of a stage, the next stage begins.

        Raises:
            RecipeError: as `Scalings.advance`; stages begin at fractions of a run whose length is not known; a recipe
                with stages while a CUDA graph is captured.
        """
        applied = applied_to(self._model)
        schedule = applied.schedule
        if schedule is not None:
            _ = schedule.starts
            if capturing():
                raise RecipeError(
                    f"recipe {schedule.name!r} has stages, which are counted on the host, and the replays of a CUDA "
                    "graph would not be counted. Leave scaler.update() out of the graph, and capture a new one "
                    "for each stage"
                )
        self._scalings.advance(skipped)
        following = vars(self._model)["_halfstep"].following
        if following.drawing[0] is not applied:
            drawing = [m._buffers for m in self._model.modules() if ATTRIBUTE in m._buffers]
            following.drawing = applied, drawing
        if following.drawing[1]:
            noise.advance(following.drawing[1])
        self._made += 1
        if schedule is not None:
            schedule.steps += 1
            self._keep_up()

    def _keep_up(self) -> None:
        schedule = applied_to(self._model).schedule
        if schedule is not None and schedule.due != schedule.stage:
            _switch(self._model, schedule.due)

    def state_dict(self) -> dict[str, Any]:
        """The entries that the scaler saves with its own: `recipe`, `steps`, and, unless empty, `scaling`, `stages`,
        `noise` and `communication`."""
        schedule, reduction = schedule_of(self._model), part_of(self._model).reduction
        found: dict[str, Any] = {
            **({} if self._origin is None else {RECIPE: self._origin.mark, "steps": self._made}),
            "scaling": self._scalings.state_dict(),
            "stages": {} if schedule is None else schedule.state(),
            "noise": noise.state(self._model),
            "communication": {} if reduction is None else reduction.state_dict(),
        }
        return {
            name: state for name, state in found.items() if state or name == "steps"
        }  # torch.distributed.checkpoint loads only entries that exist already

    def differs(self, saved: Mapping[str, Any]) -> str | None:
        """`Origin.differs` of a saved `state_dict`."""
        return self._origin.differs(saved.get(RECIPE), "the scaler's state") if self._origin is not None else None

    def begin(self, saved: Mapping[str, Any]) -> list[str]:
        """Go on under this recipe from another recipe's state; returns texts that say what became of its entries."""
        schedule, told = applied_to(self._model).schedule, []
        if schedule is not None:
            self._load_steps(schedule, saved.get("stages", saved).get("steps", 0))
            told.append(f"it goes on after step {schedule.steps} in stage {schedule.stage + 1}")
        elif "stages" in saved:
            told.append("stages end, and this recipe holds to the end")
        self._made = saved.get("steps", 0)
        if "noise" in saved:
            noise.load(self._model, saved["noise"])
        own = bool(self._scalings.state_dict())
        self._scalings.reset()
        if own or "scaling" in saved:
            told.append("scaling states start over" if own else "scaling states are dropped")
        return told

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a `state_dict`: first the stage, then its scaling states. Missing entries start over, with a warning.

        Raises:
            LossScaleError: scaling states of other layers or of another length.
        """
        for load, name in (
            (self._load_stage, "stages"),
            (self._load_noise, "noise"),
            (self._load_scaling, "scaling"),
            (self._load_communication, "communication"),
        ):
            for told in load(saved.get(name, {})):
                warnings.warn(told, stacklevel=3)
        self._made = saved.get("steps", 0)

    def _load_scaling(self, saved: Mapping[str, Any]) -> Iterator[str]:
        if self._scalings.state_dict() and not saved:
            self._scalings.reset()
            yield (
                "the scaler state holds no scaling states, so the model's scales start over; save "
                "scaler.state_dict() beside the model to resume exactly"
            )
        else:
            self._scalings.load_state_dict(saved)

    def _load_communication(self, saved: Mapping[str, Any]) -> Iterator[str]:
        reduction = part_of(self._model).reduction
        if reduction is not None:
            yield from reduction.load_state_dict(saved)
        elif saved:
            yield (
                "the scaler state holds what gradients' reduction remembers, and this model has none yet: it starts "
                "over. To resume exactly, call halfstep.distributed.compress(ddp), or reduce_gradients(model, ...) "
                "before there are gradients, and then scaler.load_state_dict"
            )

    def _load_noise(self, saved: Mapping[str, int]) -> Iterator[str]:
        if saved:
            noise.load(self._model, saved)
        elif noise.seed(self._model) is not None:
            yield (
                "the scaler state holds no seed of the noise that layers draw, so the run goes on with other noise; "
                "save scaler.state_dict() beside the model to resume exactly"
            )

    def _load_stage(self, saved: Mapping[str, Any]) -> Iterator[str]:
        schedule = applied_to(self._model).schedule
        if schedule is not None:
            schedule.steps = int(saved.get("steps", 0))
            if not saved:
                yield (
                    f"the scaler state does not say how many steps were made, so recipe {schedule.name!r} begins with "
                    "its first stage; save scaler.state_dict() beside the model to resume where it was"
                )
            elif list(saved["starts"]) != list(schedule.starts):
                yield (
                    f"the scaler state is of a run of {saved['total_steps']} steps whose stages began after "
                    f"{saved['starts']}; in this one, of {schedule.total_steps}, they begin after "
                    f"{list(schedule.starts)}. It goes on after step {schedule.steps} in stage {schedule.due + 1}, and "
                    f"was in stage {saved['stage'] + 1}"
                )
            self._load_steps(schedule, schedule.steps)
        elif saved:
            yield (
                f"the scaler state was saved after {saved['steps']} steps of a recipe with stages, and recipe "
                f"{applied_to(self._model).recipe.name!r} has none: it holds from here to the end"
            )

    def _load_steps(self, schedule: Schedule, steps: int) -> None:
        clock = applied_to(self._model).clock
        assert clock is not None
        clock.begin(self._model)  # weights are loaded with it, which is no optimizer step
        schedule.steps = int(steps)
        self._keep_up()
