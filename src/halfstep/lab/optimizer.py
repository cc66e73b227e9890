"""Prepare a run's model before its first step: the optimizer, and unit scaling if the recipe asks for it."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ModelError, RunError, one_of
from halfstep.lab.experiment import Experiment
from halfstep.lab.task import Batch, Task
from halfstep.nn import UnitReport, unit_scale
from halfstep.optim import Combined, update_rules
from halfstep.unit import parameter_groups


def build_optimizer(experiment: Experiment, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `experiment.optimizer` names, for `halfstep.prepare`: matrices decay, vectors do not.

    Betas are the experiment's; a momentum is the first of them. Optimizers that would add weight decay to the gradient
    get none: Adam would divide it by the size of the gradient, so that a loss scale or a weight's scale would change
    its effect.

    A model with a `parametrization` (`UnitGPT`) has groups with their own learning rates; `factor` in a group is its
    rate relative to the experiment's.

    If the rule takes only matrices (Muon), AdamW takes the other parameters and embeddings, at the same learning rate:
    Muon's step has the size of AdamW's.

    Raises:
        RunError: no update rule has that name; the message suggests the nearest ones.
    """
    rules = update_rules()
    rule = rules[one_of("optimizer", experiment.optimizer, rules, RunError)]
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
    make: Any = rule.torch_class
    options = {name: value for name, value in offered.items() if name in inspect.signature(make).parameters}
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
    """One optimizer for parameters with `dims` dimensions, and AdamW for the others."""
    tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    own = [p for group in groups for p in group["params"] if p.dim() == dims and p not in tables]
    others = [{**group, "params": [p for p in group["params"] if p not in set(own)]} for group in groups]
    made = [make(own, **options, adjust_lr_fn="match_rms_adamw")] if own else []
    if rest := [group for group in others if group["params"]]:
        usual = {"lr": experiment.lr, "betas": experiment.betas, "weight_decay": experiment.weight_decay}
        made.append(torch.optim.AdamW(rest, **usual))  # type: ignore[arg-type]
    return Combined(*made)


def unit_scale_on(model: nn.Module, task: Task, batch: Batch) -> UnitReport:
    """Unit-scale a model with the inputs of the task's loss; the loss's gradient is scaled to unit size too.

    Raises:
        ModelError: the loss does more with a model than to call it once; or as `halfstep.unit_scale`.
    """
    try:
        task.loss(_CallRecorder(), batch)
    except _CallArguments as call:
        args, kwargs = call.args
    except AttributeError as error:
        raise _otherwise(task, error) from error
    else:
        raise _otherwise(task, "it never calls the model")

    def loss(output: Any) -> Tensor:
        try:
            return task.loss(_RecordedOutput(output), batch)
        except AttributeError as error:
            raise _otherwise(task, error) from error

    return unit_scale(model, *args, loss=loss, **kwargs)


def _otherwise(task: Task, found: object) -> ModelError:
    return ModelError(
        f"{type(task).__name__}: its loss uses its model otherwise than by one call ({found}), and a recipe for "
        "unit-scaled models needs to know what the model is called with. Compare recipes without unit scaling here, or "
        "call halfstep.unit_scale in your own loop"
    )


class _CallArguments(Exception):
    """Raised with the arguments of a call."""


class _CallRecorder(nn.Module):
    """A stand-in for the model that records its call's arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `_CallArguments` with the arguments."""
        raise _CallArguments(args, kwargs)


class _RecordedOutput(nn.Module):
    """A stand-in for the model that returns a recorded output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._left = [output]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the recorded output; a second call raises."""
        if not self._left:
            raise AttributeError("it calls the model more than once")
        return self._left.pop()
