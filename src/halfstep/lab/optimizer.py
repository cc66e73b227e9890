"""The optimizer of an experiment, over the parameters of a model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from halfstep.errors import RunError, unknown
from halfstep.lab.experiment import Experiment
from halfstep.optim import Combined, update_rules
from halfstep.unit import parameter_groups


def build_optimizer(experiment: Experiment, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `experiment.optimizer` names, for `halfstep.prepare`: matrices decay, vectors do not.

    Where it has betas they are the experiment's; where it has a momentum it is the first of them. Decay that would be
    added to the gradient is left out: Adam would divide it by the size of the gradient, and so a loss scale or a
    weight's scale would change what it does.

    A model with a `parametrization` (`UnitGPT`) has groups with their own learning rates, and in each, as
    `factor`, what the experiment's is multiplied by.

    Where it takes matrices alone (Muon), AdamW takes the other parameters and embeddings, at the same learning rate:
    its step is of the size of AdamW's.

    Raises:
        RunError: no update rule has that name; the nearest ones are shown.
    """
    rules = update_rules()
    if experiment.optimizer not in rules:
        raise RunError(unknown("optimizer", experiment.optimizer, rules))
    rule = rules[experiment.optimizer]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    offered = {
        "lr": experiment.lr,
        "betas": experiment.betas,
        "momentum": experiment.betas[0],
        "weight_decay": experiment.weight_decay,
    }
    groups = [group for group in groups if group["params"]]
    if isinstance(named := getattr(model, "parametrization", None), str):
        scaled = {"lr": experiment.lr, "weight_decay": experiment.weight_decay, "decay": "coupled"}
        groups = parameter_groups(model, rule.torch_class, groups=groups, parametrization=named, **scaled)  # type: ignore[arg-type]
        for group in groups:
            group["factor"] = group["lr"] / experiment.lr
    taken = inspect.signature(rule.torch_class).parameters
    options = {name: value for name, value in offered.items() if name in taken}
    make: Any = rule.torch_class
    if rule.dims is not None:
        return _combined(make, rule.dims, model, groups, options, experiment)
    optimizer: torch.optim.Optimizer = make(groups, **options)
    for group in optimizer.param_groups:
        if rule.decay is not None and rule.decay(group)[0]:
            group["weight_decay"] = 0.0
    return optimizer


def _combined(
    make: Any,
    dims: int,
    model: nn.Module,
    groups: list[dict[str, Any]],
    options: dict[str, Any],
    experiment: Experiment,
) -> Combined:
    """The optimizer of parameters of so many dimensions, and AdamW of the others."""
    tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    own = [p for group in groups for p in group["params"] if p.dim() == dims and p not in tables]
    others = [{**group, "params": [p for p in group["params"] if p not in set(own)]} for group in groups]
    adamw: Any = torch.optim.AdamW
    rest = [group for group in others if group["params"]]
    made = [make(own, **options, adjust_lr_fn="match_rms_adamw")] if own else []
    if rest:
        made.append(adamw(rest, lr=experiment.lr, betas=experiment.betas, weight_decay=experiment.weight_decay))
    return Combined(*made)
