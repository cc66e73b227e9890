"""How the scale of a tile is chosen: one rule a file, found by name. A scale is always multiplied to get back."""

from functools import cache

from halfstep.errors import QuantizationError, unknown
from halfstep.quant.scaling.base import Scaling, StatefulScaling
from halfstep.registry import collect


__all__ = ["Scaling", "StatefulScaling", "get_scaling"]


@cache
def _by_name() -> dict[str, Scaling]:
    return collect("halfstep.quant.scaling", Scaling)  # type: ignore[type-abstract]


def get_scaling(name: str | Scaling) -> Scaling:
    """The rule of that name.

    Raises:
        QuantizationError: there is none; the nearest ones are shown.
    """
    if isinstance(name, Scaling):
        return name
    if name not in _by_name():
        raise QuantizationError(unknown("scale rule", name, _by_name()))
    return _by_name()[name]
