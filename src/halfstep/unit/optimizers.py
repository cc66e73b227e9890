"""What a learning-rate rule has to know of an optimizer, and weight decay that does not follow the learning rate."""

from dataclasses import dataclass
from typing import Any

import torch

from halfstep.errors import OptimizerError, unknown


@dataclass(frozen=True)
class OptimizerKind:
    """How an optimizer's step follows a gradient.

    `adam`: the step stays when all gradients are multiplied by one constant; `sgd`: it is multiplied too.
    """

    rule: str
    decoupled: bool
    """Whether weight decay multiplies the weight by 1 - lr decay, instead of being added to the gradient."""


_KNOWN = {
    **dict.fromkeys((
        "adamw", "lion", "lamb", "adafactor", "adamw8bit", "adamw4bit", "adamwfp8", "pagedadamw", "pagedadamw8bit",
        "pagedadamw32bit", "adamw32bit", "lion8bit", "lion32bit", "pagedlion", "pagedlion8bit", "lamb8bit", "lamb32bit",
        "fusedlamb", "ademamix", "ademamix8bit", "deepspeedcpulion", "adamwschedulefree",
    ), OptimizerKind("adam", True)),
    **dict.fromkeys((
        "adam", "adamax", "nadam", "radam", "adagrad", "rmsprop", "adam8bit", "adam32bit", "pagedadam", "sparseadam",
    ), OptimizerKind("adam", False)),
    "sgd": OptimizerKind("sgd", True),  # without momentum its decay multiplies the weight by 1 - lr decay
}  # fmt: skip


def optimizer_kind(optimizer: type[torch.optim.Optimizer] | str) -> OptimizerKind:
    """How that class, or the optimizer of that name, follows a gradient. A subclass of a known class is of its kind.

    Raises:
        OptimizerError: neither is known; an instance is no class.
    """
    if isinstance(optimizer, str):
        names = [optimizer]
    elif isinstance(optimizer, type):
        names = [base.__name__ for base in optimizer.__mro__]
    else:
        raise OptimizerError(
            f"an instance of {type(optimizer).__name__} found; expected its class: the groups come first, then "
            f"{type(optimizer).__name__}(halfstep.unit.parameter_groups(model, {type(optimizer).__name__}, lr=...))"
        )
    for name in names:
        if (kind := _KNOWN.get(name.lower())) is not None:
            return kind
    raise OptimizerError(
        f"{unknown('optimizer', names[0], _KNOWN)}. The learning-rate rules depend on how it follows a gradient: give "
        "optimizer='adamw' if its step stays when the gradient is multiplied by a constant and its decay multiplies "
        "the weight by 1 - lr decay; 'adam' if that decay is added to the gradient; 'sgd' if the step is multiplied too"
    )


def decouple_decay(optimizer: torch.optim.Optimizer) -> None:
    """Hold, from step to step, the decay of the groups that `parameter_groups(decay="decoupled")` made.

    torch's optimizers, and halfstep's, multiply a weight by 1 - lr * weight_decay. Before each step this sets
    weight_decay to decay_per_step / lr, with the learning rate that the scheduler has left there. Call it once, on the
    optimizer that steps: after `halfstep.prepare`, on what came back; after a copy or a pickle of the optimizer, which
    torch makes without hooks, again. A step with a learning rate of zero moves nothing, and decays nothing.

    Raises:
        OptimizerError: no group has a `decay_per_step`; or one has momentum, which spreads what SGD adds to the
            gradient over the steps that follow.

    Source: Narayan et al. 2025, arXiv 2502.05967 (fully decoupled decay).
    """
    groups = [group for group in optimizer.param_groups if "decay_per_step" in group]
    if not groups:
        raise OptimizerError(
            "no group of this optimizer has decay_per_step: make them by "
            "halfstep.unit.parameter_groups(model, ..., decay='decoupled')"
        )
    if any(group.get("momentum") and group["decay_per_step"] for group in groups):
        raise OptimizerError(
            "SGD with momentum adds decay to the gradient, and so spreads it over later steps: decay per step wants "
            "momentum=0, or AdamW, Lion"
        )
    _set(optimizer)
    optimizer.register_step_pre_hook(_set)


def _set(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        if "decay_per_step" in group and rate:
            group["weight_decay"] = group["decay_per_step"] / rate
