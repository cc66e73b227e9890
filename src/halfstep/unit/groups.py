"""`parameter_groups`: parameter groups with learning rates and weight decays by the roles of parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError, OptimizerError, one_of
from halfstep.text import grouped
from halfstep.unit.parametrization import DECAYS, Parametrization, get_parametrization
from halfstep.unit.roles import OptimizerKind, Role, known_roles, no_role, optimizer_kind, unit_part


def parameter_groups(
    model: nn.Module,
    optimizer: type[torch.optim.Optimizer] | str,
    *,
    lr: float,
    weight_decay: float = 0.0,
    parametrization: str | Parametrization = "umup",
    decay: str | None = None,
    groups: Iterable[Mapping[str, Any]] | None = None,
    readout_constraint: str | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer of torch or halfstep, each with one learning rate and one weight decay.

    A parameter's learning rate is `lr` times the parametrization's factor for its role (`unit.roles`). Schedulers
    multiply it further, as that of any group. A frozen parameter is in a group too, if its role is known.

    Args:
        optimizer: its class or name.
        weight_decay: as `decay` says; also for biases and gains, unless `groups` says otherwise.
        parametrization: a name (`standard`, `umup`, `munit`), or the result of `unit.get_parametrization`.
        decay: the meaning of `weight_decay`: `coupled`, `independent` or `decoupled` (`unit.DECAYS`); None: the
            parametrization's default. After `decoupled` call `unit.decouple_decay(optimizer)`.
        groups: existing groups, with `params` and options. Each is split by factors and keeps its options; its `lr` and
            `weight_decay` take precedence over the arguments. None: all parameters of the model.
        readout_constraint: for SGD, if the model has no `unit.LinearReadout` with a constraint.

    Raises:
        ModelError: a parameter with an unknown role; a tied one whose roles need two learning rates; a parameter of
            `groups` that is not the model's; an empty model.
        OptimizerError: an unknown optimizer, or one without a rule in the parametrization or for the decay; a learning
            rate that is not positive.

    >>> model = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2))
    >>> from halfstep.unit import set_roles
    >>> set_roles(model, {"0.weight": "input", "2.weight": "hidden", "4.weight": "readout"})
    >>> [(len(g["params"]), g["lr"]) for g in parameter_groups(model, torch.optim.AdamW, lr=0.5)]
    [(5, 0.5), (1, 0.03125)]
    """
    kind, rule = optimizer_kind(optimizer), get_parametrization(parametrization)
    meaning = one_of("decay", rule.decay if decay is None else decay, DECAYS, OptimizerError)
    readout = readout_constraint if readout_constraint is not None else _readout(model)
    given = [_listed(group) for group in ([{"params": model.parameters()}] if groups is None else groups)]
    factors = _factors(model, given, lambda role: rule.lr(role, kind, readout))
    made: list[dict[str, Any]] = []
    for group in given:
        options = {key: value for key, value in group.items() if key not in ("params", "lr", "weight_decay")}
        rate, strength = group.get("lr", lr), float(group.get("weight_decay", weight_decay))
        _check(rate, strength, meaning, kind, optimizer)
        split = grouped((factors[parameter], parameter) for parameter in group["params"] if parameter in factors)
        for factor, parameters in split.items():
            own = rate * factor
            decays = {"weight_decay": strength if meaning == "coupled" else strength / float(own)}
            decays |= {"decay_per_step": strength} if meaning == "decoupled" else {}
            made.append({"params": parameters, "lr": own, **decays, **options})
    return made


def _listed(group: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise OptimizerError(
            f"a group of type {type(group).__name__} found; expected {{'params': [...], ...}}, as torch takes them; "
            "for all parameters of the model leave groups out"
        )
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def _factors(model: nn.Module, groups: list[dict[str, Any]], factor: Any) -> dict[Tensor, float]:
    """Each parameter's learning-rate factor, without frozen parameters of unknown roles."""
    known, missing = known_roles(model)
    names = grouped((parameter, name) for name, parameter in model.named_parameters(remove_duplicate=False))
    wanted = [parameter for group in groups for parameter in group["params"]]
    if not wanted:
        raise ModelError(f"{type(model).__name__} has no parameters to group; build its layers first")
    strangers = sum(parameter not in names for parameter in wanted)
    if strangers:
        raise ModelError(
            f"{strangers} of the parameters in groups are not {type(model).__name__}'s, which knows their roles: give "
            "the model that has them all, or take them out and add them to what comes back"
        )
    if len(set(wanted)) < len(wanted):
        raise ModelError("a parameter stands in two groups; give it once")
    unsaid = [name for p in wanted for name in names[p] if name in missing and p.requires_grad]
    if unsaid:
        raise ModelError(no_role(unsaid))
    return {p: _one(names[p], known, factor) for p in wanted if all(name in known for name in names[p])}


def _one(names: list[str], known: Mapping[str, Role], factor: Any) -> float:
    found = {name: float(factor(known[name])) for name in names}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name} ({known[name].kind}) {value:g}" for name, value in found.items())
        raise ModelError(
            f"a tied parameter has roles with different learning-rate factors: {said}. Untie it, or give it one role: "
            f"halfstep.unit.set_roles(model, {{{', '.join(f'{name!r}: {known[names[0]].kind!r}' for name in names)}}})"
        )
    return next(iter(found.values()))


def _readout(model: nn.Module) -> str | None:
    """The constraint of the model's readouts; None if there are none or they differ."""
    named = {name for module in model.modules() if (name := unit_part(module).readout) is not None}
    return named.pop() if len(named) == 1 else None


def _check(rate: Any, strength: float, meaning: str, kind: OptimizerKind, optimizer: Any) -> None:
    if not float(rate) > 0:
        raise OptimizerError(f"lr = {rate} given; expected a positive number, the peak of the schedule")
    if strength < 0:
        raise OptimizerError(f"weight_decay = {strength} given; expected a number of at least 0")
    if strength and meaning != "coupled" and not kind.decoupled:
        name = optimizer if isinstance(optimizer, str) else optimizer.__name__
        raise OptimizerError(
            f"{name} adds weight decay to the gradient and normalises both, so that no decay is {meaning} of the "
            "learning rate: take AdamW, or weight_decay=0, or decay='coupled'"
        )
