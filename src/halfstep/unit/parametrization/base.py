"""`Parametrization`: the multiplier, the initial scale and the learning-rate factor of weights, by role."""

from collections.abc import Callable
from dataclasses import dataclass

from halfstep.unit.roles import OptimizerKind, Role


DECAYS = {
    "coupled": "a step takes lr * weight_decay of a weight, with the group's learning rate: torch's own",
    "independent": "a step at the peak learning rate takes weight_decay of a weight, and follows the schedule",
    "decoupled": "every step takes weight_decay of a weight, whatever the learning rate (`unit.decouple_decay`)",
}
"""The meanings of weight decay, by name."""


def unit_multiplier(role: Role) -> float:
    """fan_in^-1/2 for hidden matrices and the input layer's, so that outputs have unit variance; 1 / fan_in for the
    readout; 1 for all others, including embedding tables."""
    if role.kind == "readout":
        return 1 / role.fan_in
    return float(role.fan_in**-0.5) if role.kind in ("hidden", "input") else 1.0


def unit_init(role: Role) -> float:
    """The initial standard deviation: 0 for biases, 1 for all others."""
    return 0.0 if role.kind == "bias" else 1.0


@dataclass(frozen=True)
class Parametrization:
    """W = A w, with w ~ N(0, B^2) initially and C times the learning rate for w; A, B and C depend on the role.

    Training with an Adam-like optimizer does not change under A <- A t, B <- B / t, C <- C / t.
    """

    name: str
    summary: str
    source: str
    multiplier: Callable[[Role], float]
    """A."""
    init: Callable[[Role], float]
    """B."""
    lr: Callable[[Role, OptimizerKind, str | None], float]
    """C, from the role, the optimizer and the readout's constraint (None: unknown).

    Raises an OptimizerError if the source has no rule for that optimizer."""
    decay: str = "coupled"
    """The default meaning of weight decay (`DECAYS`)."""
    transfer: Callable[[int, int], Callable[[Role, OptimizerKind, str | None], float]] | None = None
    """transfer(base width, width): C relative to the base width; None: the rule has no base width."""
