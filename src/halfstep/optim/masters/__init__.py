"""What takes the update: the weight itself, or a master kept beside it; one way a file."""

from functools import cache

from halfstep.errors import RecipeError, unknown
from halfstep.optim.masters.base import Kept, Master
from halfstep.optim.masters.own import Own
from halfstep.registry import collect


__all__ = ["Kept", "Master", "Own", "get_master"]


@cache
def _by_name() -> dict[str, Master]:
    return collect("halfstep.optim.masters", Master)  # type: ignore[type-abstract]


def get_master(name: str | None) -> Master:
    """The master of that name; None is no master.

    Raises:
        RecipeError: no master has that name.
    """
    if (name or "none") not in _by_name():
        raise RecipeError(unknown("master", name, _by_name()))
    return _by_name()[name or "none"]
