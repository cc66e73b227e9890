"""Read the ledger: claims.toml, in this folder."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from halfstep.claims.claim import Claim, Number, Reference
from halfstep.errors import ClaimError, unknown


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
    for claim in load():
        if claim.id == id:
            return claim
    raise ClaimError(unknown("claim", id, [claim.id for claim in load()]))


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
