"""What a learning-rate rule has to know of an optimizer, told by its class or its name."""

from __future__ import annotations

from dataclasses import dataclass

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


_DECOUPLED, _COUPLED = OptimizerKind("adam", True), OptimizerKind("adam", False)
_ADAM_W = (
    "adamw", "lion", "lamb", "adafactor", "adamw8bit", "adamw4bit", "adamwfp8", "pagedadamw", "pagedadamw8bit",
    "pagedadamw32bit", "adamw32bit", "lion8bit", "lion32bit", "pagedlion", "pagedlion8bit", "lamb8bit", "lamb32bit",
    "fusedlamb", "ademamix", "ademamix8bit", "deepspeedcpulion", "adamwschedulefree",
)  # fmt: skip
_ADAM = ("adam", "adamax", "nadam", "radam", "adagrad", "rmsprop", "adam8bit", "adam32bit", "pagedadam", "sparseadam")
_KNOWN = {
    **dict.fromkeys(_ADAM_W, _DECOUPLED),
    **dict.fromkeys(_ADAM, _COUPLED),
    "sgd": OptimizerKind("sgd", True),  # without momentum its decay multiplies the weight by 1 - lr decay
}


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
