"""Parametrizations, one a file, found by name."""

from dataclasses import replace

from halfstep.errors import ModelError, one_of
from halfstep.registry import family
from halfstep.unit.parametrization.base import DECAYS, Parametrization


__all__ = ["DECAYS", "Parametrization", "get_parametrization", "list_parametrizations"]


_by_name = family("halfstep.unit.parametrization", Parametrization)


def list_parametrizations() -> tuple[str, ...]:
    """The names of all parametrizations."""
    return tuple(sorted(_by_name()))


def get_parametrization(
    name: str | Parametrization, base_width: int | None = None, width: int | None = None
) -> Parametrization:
    """The parametrization of that name, or the given one, for the given widths.

    Args:
        base_width, width: the width at which the learning rate was tuned, and the width of this model; both or neither.
            If the rule has a base width (munit's), hidden matrices learn with sqrt(base_width / width) of the rate.

    Raises:
        ModelError: an unknown name; one width alone, or widths that are not positive; widths for a rule without a base.

    >>> get_parametrization("umup").decay
    'independent'
    """
    known = _by_name()
    found = name if isinstance(name, Parametrization) else known[one_of("parametrization", name, known, ModelError)]
    if base_width is None and width is None:
        return found
    if base_width is None or width is None or base_width < 1 or width < 1:
        raise ModelError(f"base_width = {base_width}, width = {width} given; expected both, positive, or neither")
    if found.transfer is None:
        raise ModelError(
            f"base_width = {base_width} given with {found.name!r}, whose rule has no base: leave both widths out, or "
            "take 'munit'"
        )
    return replace(found, lr=found.transfer(base_width, width))
