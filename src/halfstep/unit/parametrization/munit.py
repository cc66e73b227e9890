"""munit scaling: fan_in^-1/2 forward and backward, muP's learning rates, weight decay decoupled from them."""

from collections.abc import Callable

from halfstep.errors import OptimizerError
from halfstep.unit.parametrization.base import Parametrization, unit_init, unit_multiplier
from halfstep.unit.roles import OptimizerKind, Role


def _rate(role: Role, optimizer: OptimizerKind, of_hidden: float) -> float:
    """The learning-rate factor: `of_hidden` for hidden matrices, 1 for all others.

    Raises:
        OptimizerError: the optimizer is not Adam-like.
    """
    if optimizer.rule != "adam":
        raise OptimizerError(
            "munit scaling has a learning-rate rule for Adam-like optimizers alone (AdamW, Lion ...), and this one's "
            "steps grow with the gradient: take one of those, or parametrization='umup', which has one for SGD"
        )
    return of_hidden if role.kind == "hidden" else 1.0


def _lr(role: Role, optimizer: OptimizerKind, readout: str | None) -> float:
    """The learning-rate factor: fan_in^-1/2 for hidden matrices, 1 for all others."""
    return _rate(role, optimizer, role.fan_in**-0.5)


def _transfer(base_width: int, width: int) -> Callable[[Role, OptimizerKind, str | None], float]:
    """The learning-rate factor relative to a base width: sqrt(base_width / width) for hidden matrices, 1 for others."""

    def lr(role: Role, optimizer: OptimizerKind, readout: str | None) -> float:
        return _rate(role, optimizer, (base_width / width) ** 0.5)

    return lr


munit = Parametrization(
    name="munit",
    summary="Static factors alike in both directions; learning rate and decay of a base width serve a larger one.",
    source="Narayan et al. 2025 (munit Scaling), arXiv 2502.05967, tables 2 and 6",
    multiplier=unit_multiplier,
    init=unit_init,
    lr=_lr,
    decay="decoupled",
    transfer=_transfer,
)
