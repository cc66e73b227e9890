"""Measure a claim again, and compare with what the ledger records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.claims.checks import get_check
from halfstep.claims.claim import Claim
from halfstep.errors import ClaimError


@dataclass(frozen=True)
class Outcome:
    """What a check measured now, beside its claim."""

    claim: Claim
    measured: Mapping[str, float]

    def agreements(self) -> dict[str, bool]:
        """Whether each number is confirmed; a number that only one side has is not."""
        recorded = self.claim.numbers
        names = [*recorded, *(name for name in self.measured if name not in recorded)]
        return {
            name: name in recorded and name in self.measured and recorded[name].agrees(self.measured[name])
            for name in names
        }

    @property
    def agrees(self) -> bool:
        """Whether all numbers are."""
        return all(self.agreements().values())


def run(claim: Claim) -> Outcome:
    """Run the claim's check in this process.

    Raises:
        ClaimError: its command is not a check, or there is no such check.
    """
    if claim.check is None:
        raise ClaimError(
            f"claim {claim.id!r} has no check to run: its command is {claim.command or 'not written yet'!r}; "
            "run that command itself"
        )
    return Outcome(claim, get_check(claim.check).measure())
