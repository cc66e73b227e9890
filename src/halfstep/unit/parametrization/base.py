"""What a parametrization is: a weight's factor in the product, its scale at the start, and its learning rate."""

from collections.abc import Callable
from dataclasses import dataclass

from halfstep.unit.roles import OptimizerKind, Role


DECAYS = {
    "coupled": "a step takes lr * weight_decay of a weight, with the group's learning rate: torch's own",
    "independent": "a step at the peak learning rate takes weight_decay of a weight, and follows the schedule",
    "decoupled": "every step takes weight_decay of a weight, whatever the learning rate (`unit.decouple_decay`)",
}
"""What a weight decay means, by its name."""


def unit_multiplier(role: Role) -> float:
    """fan_in^-1/2 for hidden matrices and for one that takes the data, so that what leaves it has unit variance too;
    1 / fan_in for the last; 1 for all else, tables among them."""
    if role.kind == "readout":
        return 1 / role.fan_in
    return float(role.fan_in**-0.5) if role.kind in ("hidden", "input") else 1.0


def unit_init(role: Role) -> float:
    """0 for biases, 1 for all else."""
    return 0.0 if role.kind == "bias" else 1.0


@dataclass(frozen=True)
class Parametrization:
    """W = A w, with w ~ N(0, B^2) at the start, and steps of w of C times the learning rate, each by the role.

    Training with an Adam-like optimizer stays the same under A <- A t, B <- B / t, C <- C / t.
    """

    name: str
    summary: str
    source: str
    multiplier: Callable[[Role], float]
    """A."""
    init: Callable[[Role], float]
    """B."""
    lr: Callable[[Role, OptimizerKind, str | None], float]
    """C, given the optimizer and the readout's constraint (None: unknown).

    Raises an OptimizerError where the source has no rule for that optimizer."""
    decay: str = "coupled"
    """How weight decay is meant (`DECAYS`)."""
    transfer: Callable[[int, int], Callable[[Role, OptimizerKind, str | None], float]] | None = None
    """C relative to a base width, given that and the model's width; None: the rule has no base."""
