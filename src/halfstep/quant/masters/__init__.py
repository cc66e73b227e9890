"""What the update is applied to: the weight itself, or a master kept beside it; found by name."""

from halfstep.errors import RecipeError, unknown
from halfstep.quant.masters.base import Kept, Master, Own
from halfstep.registry import family


__all__ = ["Kept", "Master", "Own", "get_master", "list_masters"]


_by_name = family("halfstep.quant.masters", Master)  # type: ignore[type-abstract]


def list_masters() -> list[str]:
    """The names of the masters that keep something beside a weight."""
    return sorted(_by_name().keys() - {"none"})


def get_master(name: str | None) -> Master:
    """The master of that name; None is no master.

    Raises:
        RecipeError: no master has that name.
    """
    if (name or "none") not in _by_name():
        raise RecipeError(unknown("master", name, list_masters()))
    return _by_name()[name or "none"]
