"""The standard parametrization: initial deviation 1 / sqrt(fan_in), one learning rate for all parameters."""

from halfstep.unit.parametrization.base import Parametrization
from halfstep.unit.roles import Role


def _init(role: Role) -> float:
    """The initial deviation: 0 for biases, 1 for embedding tables and gains, fan_in^-1/2 for matrices."""
    if role.kind == "bias":
        return 0.0
    return 1.0 if role.kind in ("norm", "embedding") else role.fan_in**-0.5


def _one(role: Role, *_: object) -> float:
    return 1.0


standard = Parametrization(
    name="standard",
    summary="Matrices start at fan_in^-1/2; one learning rate, whose best value moves with the width.",
    source="LeCun et al. 1998, Efficient BackProp; the row SP of Yang et al. 2022, arXiv 2203.03466",
    multiplier=_one,
    init=_init,
    lr=_one,
)
