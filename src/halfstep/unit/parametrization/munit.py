"""munit scaling: fan_in^-1/2 in both directions, muP's learning rates, decay apart from the learning rate."""

from collections.abc import Callable

from halfstep.errors import OptimizerError
from halfstep.unit.optimizers import OptimizerKind
from halfstep.unit.parametrization.base import Parametrization
from halfstep.unit.roles import Role


def _multiplier(role: Role) -> float:
    """fan_in^-1/2 for hidden matrices, 1 / fan_in for the last, 1 for the input, which in the paper is a table; a
    matrix that takes the data has fan_in^-1/2, so that what leaves it has unit variance too."""
    if role.kind == "readout":
        return 1 / role.fan_in
    return role.fan_in**-0.5 if role.kind in ("hidden", "input") else 1.0


def _init(role: Role) -> float:
    return 0.0 if role.kind == "bias" else 1.0


def _check(optimizer: OptimizerKind) -> None:
    if optimizer.rule != "adam":
        raise OptimizerError(
            "munit scaling has a learning-rate rule for Adam-like optimizers alone (AdamW, Lion ...), and this one's "
            "steps grow with the gradient: take one of those, or parametrization='umup', which has one for SGD"
        )


def _lr(role: Role, optimizer: OptimizerKind, readout: str | None) -> float:
    """fan_in^-1/2 for hidden matrices, 1 for all else."""
    _check(optimizer)
    return float(role.fan_in**-0.5) if role.kind == "hidden" else 1.0


def _transfer(base_width: int, width: int) -> Callable[[Role, OptimizerKind, str | None], float]:
    """sqrt(base_width / width) for hidden matrices: the learning rate is that of the base width."""

    def lr(role: Role, optimizer: OptimizerKind, readout: str | None) -> float:
        _check(optimizer)
        return float((base_width / width) ** 0.5) if role.kind == "hidden" else 1.0

    return lr


munit = Parametrization(
    name="munit",
    summary="Static factors alike in both directions; learning rate and decay of a base width serve a larger one.",
    source="Narayan et al. 2025 (munit Scaling), arXiv 2502.05967, tables 2 and 6",
    multiplier=_multiplier,
    init=_init,
    lr=_lr,
    decay="decoupled",
    transfer=_transfer,
)
