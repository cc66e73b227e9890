"""Measure a claim again, or read its saved benchmark figures, and compare with the ledger."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.claims.checks.base import get_check
from halfstep.claims.claim import RESULTS, Claim
from halfstep.errors import ClaimError, unknown


@dataclass(frozen=True)
class Outcome:
    """The measured values, by a check now or by a benchmark when its file was saved, with the claim."""

    claim: Claim
    measured: Mapping[str, float]

    def agreements(self) -> dict[str, bool]:
        """Whether each value is confirmed; a value that only one side has is not."""
        recorded = self.claim.numbers
        return {
            name: name in recorded and name in self.measured and recorded[name].agrees(self.measured[name])
            for name in [*recorded, *(name for name in self.measured if name not in recorded)]
        }

    @property
    def agrees(self) -> bool:
        """Whether all values are confirmed."""
        return all(self.agreements().values())


def run(claim: Claim, results: Path = Path(RESULTS)) -> Outcome:
    """Run the claim's check in this process; for a claim without one, read its values from a benchmark's results.

    Raises:
        ClaimError: it has neither, or there is no such check, or a file lacks a value.
    """
    if claim.check is not None:
        return Outcome(claim, get_check(claim.check).measure())
    if not claim.files:
        raise ClaimError(
            f"claim {claim.id!r} has no check to run and no saved benchmark figures: its command is "
            f"{claim.command or 'not written yet'!r}; run that command itself"
        )
    return Outcome(claim, {name: _figure(results, number.kept) for name, number in claim.numbers.items()})


def _figure(results: Path, place: Sequence[str]) -> float:
    """A value in a benchmark's file, by a path of keys; list elements by index."""
    name, *keys = place
    file = results / name
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClaimError(
            f"{file} cannot be read ({error.strerror}); saved figures are compared in a clone of halfstep: "
            "go to its root, or give --results FOLDER"
        ) from error
    except ValueError as error:
        raise ClaimError(f"{file} is not JSON ({error}); its benchmark rewrites it with --keep") from error
    for depth, key in enumerate(keys):
        here = dict(enumerate(found)) if isinstance(found, list) else found
        known = {str(one): value for one, value in here.items()} if isinstance(here, dict) else {}
        if key not in known:
            raise ClaimError(f"{file}, under {' / '.join(keys[:depth]) or 'the top'}: {unknown('key', key, known)}")
        found = known[key]
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ClaimError(f"{file}, {' / '.join(keys)}: found {found!r}, expected a number; correct the path in the row")
    return float(found)
