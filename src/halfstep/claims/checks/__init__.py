"""The computations behind the ledger's short rows, one object each; `python -m halfstep.claims.checks ID` runs one."""

from functools import cache

from halfstep.claims.checks.base import Check, Numbers
from halfstep.errors import ClaimError, unknown
from halfstep.registry import collect


__all__ = ["Check", "Numbers", "get_check", "list_checks"]


@cache
def _named() -> dict[str, Check]:
    return collect("halfstep.claims.checks", Check)


def list_checks() -> list[str]:
    """The names of all checks, which are the ids of their claims."""
    return sorted(_named())


def get_check(name: str) -> Check:
    """The check of that name.

    Raises:
        ClaimError: no check has that name; the nearest names are shown.
    """
    if name not in _named():
        raise ClaimError(unknown("check", name, _named()))
    return _named()[name]
