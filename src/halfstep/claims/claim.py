"""What a row of the ledger holds: a claim, where it stands, what we measured, and the verdict; the rows, read."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from halfstep.errors import ClaimError, one_of


VERDICTS = {
    "holds": "what we measured agrees, at the size given",
    "in part": "a part of the claim, or the claim under a condition it does not state",
    "not at this size": "the effect does not appear in models as small as ours",
    "contradicted": "what we measured says otherwise",
    "cannot tell": "measured, and the seeds lie further apart than what is compared",
    "open": "not measured yet",
}
"""What a verdict means."""

READ = {
    "text": "the text was read",
    "abstract": "the abstract was read",
    "code": "the code and its documentation were read",
    "secondary": "secondary: from notes and slides about it",
}
"""What of a source was read."""

CHECKS = "halfstep.claims.checks"
"""The module whose command line runs a check: `python -m halfstep.claims.checks ID`."""

RESULTS = "benchmarks/results"
"""Where a clone keeps the figures of its benchmarks, one JSON file each; an installed package has none."""

SHORT = 60.0
"""A row is short if its command takes less than this many seconds on two slow cores."""


@dataclass(frozen=True)
class Reference:
    """Where a claim stands, and what of it was read (a key of `READ`)."""

    authors: str
    title: str
    where: str
    read: str
    year: int | None = None
    arxiv: str | None = None

    def __str__(self) -> str:
        year = f" {self.year}" if self.year else ""
        arxiv = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f"{self.authors}{year}{arxiv}, {self.where}"


@dataclass(frozen=True)
class Number:
    """A measured number, and how far a repetition may lie from it."""

    value: float
    tolerance: float = 0.0
    kept: tuple[str, ...] = ()
    """Where a benchmark keeps it: a file under `RESULTS`, then the keys; empty where the row's check measures it."""

    def agrees(self, measured: float) -> bool:
        """Whether a repetition that gave `measured` confirms it. NaN never does.

        >>> Number(0.8, tolerance=0.01).agrees(0.805), Number(16.0).agrees(16.5)
        (True, False)
        """
        return abs(measured - self.value) <= self.tolerance


@dataclass(frozen=True)
class Claim:
    """One row. An open one has no figure, and may have no command yet."""

    id: str
    subject: str
    """What it is about: a heading of the page."""
    claim: str
    reference: Reference
    conditions: str
    """The source's."""
    verdict: str
    """A key of `VERDICTS`."""
    command: str = ""
    """The shell command that measures it again."""
    seconds: float | None = None
    """What the command takes on two slow cores."""
    template: str = ""
    """The figure in words, with {name} where a number stands."""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    machine: str = ""
    date: str = ""
    note: str = ""

    @property
    def figure(self) -> str:
        """Our figure in words, with its numbers."""
        return self.template.format(**{name: number.value for name, number in self.numbers.items()})

    @property
    def files(self) -> tuple[str, ...]:
        """The kept files that its numbers stand in."""
        return tuple(dict.fromkeys(number.kept[0] for number in self.numbers.values() if number.kept))

    @property
    def short(self) -> bool:
        """Whether the command takes less than a minute on two slow cores."""
        return self.seconds is not None and self.seconds < SHORT

    @property
    def check(self) -> str | None:
        """The name of the check that the command runs; None where it is another command."""
        words = shlex.split(self.command)
        return words[3] if words[:3] == ["python", "-m", CHECKS] and len(words) == 4 else None


@cache
def data() -> Mapping[str, Any]:
    """The file as it is: the machines and the subjects by short name, and the rows."""
    return tomllib.loads(files("halfstep.claims").joinpath("claims.toml").read_text(encoding="utf-8"))


@cache
def load() -> tuple[Claim, ...]:
    """All claims, by subject. What a row may hold is checked by the tests, with `rules.problems`."""
    order = list(data()["subject"].values())
    claims = (claim_from(row, data()["machine"], data()["subject"]) for row in data()["claim"])
    return tuple(sorted(claims, key=lambda claim: order.index(claim.subject)))


def get_claim(id: str) -> Claim:
    """The claim of that id.

    Raises:
        ClaimError: no claim has that id; the nearest ids are shown.
    """
    claims = {claim.id: claim for claim in load()}
    return claims[one_of("claim", id, claims, ClaimError)]


def claim_from(row: Mapping[str, Any], machines: Mapping[str, str], subjects: Mapping[str, str]) -> Claim:
    """A claim from its TOML table, which keeps the rules."""
    made = ("reference", "numbers", "machine", "subject", "figure")
    rest = {key: value for key, value in row.items() if key not in made}
    return Claim(
        **rest,
        reference=Reference(**row["reference"]),
        subject=subjects.get(row["subject"], ""),
        numbers={
            name: Number(**{**number, "kept": tuple(number.get("kept", ()))})
            for name, number in row.get("numbers", {}).items()
        },
        machine=machines.get(row.get("machine", ""), ""),
        template=row.get("figure", ""),
    )
