"""u-muP: the maximal update parametrization on unit scaling."""

from halfstep.errors import OptimizerError
from halfstep.unit.parametrization.base import Parametrization, unit_init, unit_multiplier
from halfstep.unit.roles import OptimizerKind, Role


def _adam(role: Role) -> float:
    """The learning-rate factor for Adam: fan_in^-1/2 for hidden matrices, fan_out^-1/2 (fan_out: the model's width) for
    embeddings, 1 for the input layer, the readout, gains and biases.

    The embedding's factor is empirical; the official library could not derive it.
    """
    if role.kind == "hidden":
        return float(role.fan_in**-0.5)
    return float(role.fan_out**-0.5) if role.kind == "embedding" else 1.0


def _sgd(role: Role) -> float:
    """The learning-rate factor for SGD with a readout whose gradient's factor is tied to its output's, and so shrinks
    with the width: sqrt(fan_in) for matrices (for embeddings sqrt(width)), the number of elements for gains and biases,
    1 for the readout."""
    if role.kind in ("hidden", "input"):
        return float(role.fan_in**0.5)
    if role.kind == "embedding":
        return float(role.fan_out**0.5)
    return 1.0 if role.kind == "readout" else float(role.fan_in)


def _lr(role: Role, optimizer: OptimizerKind, readout: str | None) -> float:
    """The learning-rate factor by the optimizer's rule, times depth^-1/2 for parameters in a residual stack.

    SGD with an unconstrained readout has gradients of unit size, as Adam's normalized ones, and follows Adam's rule.
    """
    depth = 1.0 if role.depth is None else float(role.depth**-0.5)
    if optimizer.rule == "adam" or readout == "none":
        return depth * _adam(role)
    if readout == "to_output":
        return depth * _sgd(role)
    found = readout or "unknown, as no unit.LinearReadout was found"
    raise OptimizerError(
        f"SGD's rule depends on the readout's constraint, which is {found}; "
        "expected 'none' or 'to_output': build the readout with one of them, or give readout_constraint="
    )


umup = Parametrization(
    name="umup",
    summary="Unit-scaled muP: no base width, no initial scale; the learning rate is the one thing to sweep.",
    source="Blake et al. 2025, arXiv 2407.17465; graphcore-research/unit-scaling, optim.py; Aleph-Alpha/scaling",
    multiplier=unit_multiplier,
    init=unit_init,
    lr=_lr,
    decay="independent",
)
