"""The rules for rows of claims.toml, with messages that say what to write instead."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

from halfstep.claims.claim import READ, SHORT, VERDICTS, claim_from
from halfstep.errors import unknown


_NEEDED = {"id": str, "subject": str, "claim": str, "reference": dict, "conditions": str, "verdict": str}
_MEASURED = {"command": str, "seconds": (int, float), "figure": str, "machine": str, "date": str}
_OTHER = {"numbers": dict, "note": str}
_REFERENCE = {"authors": str, "title": str, "where": str, "read": str}
_PAPER = {"year": int, "arxiv": str}
_NUMBER = {"value": (int, float), "tolerance": (int, float), "kept": list}
_WORDS = ("unverified", "todo", "tbd")
"""Words that no printed row may contain; only known facts are printed."""


def ledger_problems(data: Mapping[str, Any]) -> Iterator[str]:
    """The rules that the whole file violates, one message each."""
    rows, machines, subjects = data.get("claim", []), data.get("machine", {}), data.get("subject", {})
    ids = [row.get("id") for row in rows]
    for id in sorted({id for id in ids if ids.count(id) > 1}, key=str):
        yield f"claim {id!r}: {ids.count(id)} rows have this id; give each its own"
    for subject in sorted(subjects.keys() - {row.get("subject") for row in rows}):
        yield f"subject {subject!r} has no row; give it one, or take it out"
    for row in rows:
        name = row.get("id", "without an id")
        yield from (f"claim {name!r}: {message}" for message in problems(row, machines, subjects))


def problems(row: Mapping[str, Any], machines: Mapping[str, str], subjects: Mapping[str, str]) -> Iterator[str]:
    """The rules that one row violates. Contents are checked only if all fields are right."""
    needed = _NEEDED | (_MEASURED if row.get("verdict") != "open" else {})
    found = list(_fields(row, needed, _NEEDED | _MEASURED | _OTHER))
    if isinstance(row.get("reference"), dict):
        found += _fields(row["reference"], _REFERENCE, _REFERENCE | _PAPER, "reference.")
    for name, number in row.get("numbers", {}).items():
        found += _fields(number, {"value": _NUMBER["value"]}, _NUMBER, f"numbers.{name}.")
    yield from found or _contents(row, machines, subjects)


def _fields(
    table: Mapping[str, Any], needed: Mapping[str, Any], known: Mapping[str, Any], under: str = ""
) -> list[str]:
    found = [f"{under}{name} is missing; write it" for name in needed if name not in table]
    for name, value in table.items():
        if name not in known:
            found.append(unknown("field", f"{under}{name}", [f"{under}{other}" for other in known]))
        elif not isinstance(value, known[name]) or isinstance(value, bool):
            found.append(f"{under}{name}: found {value!r}, expected {known[name]}")
        elif value == "":
            found.append(f"{under}{name} is empty; write it, or leave the field out where it may be missing")
    return found


def _contents(row: Mapping[str, Any], machines: Mapping[str, str], subjects: Mapping[str, str]) -> Iterator[str]:
    reference = row["reference"]
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", row["id"]):
        yield f"id {row['id']!r}: expected lower-case words joined by hyphens, the source's first"
    words = (("verdict", row["verdict"], VERDICTS), ("read", reference["read"], READ))
    for name, word, known in (*words, ("subject", row["subject"], subjects)):
        if word not in known:
            yield unknown(name, word, known)
    if not re.fullmatch(r"\d{4}\.\d{4,5}", reference.get("arxiv", "0000.00000")):
        yield f"reference.arxiv: found {reference['arxiv']!r}, expected an id such as 1710.03740"
    yield from (f"says {word!r}; only what is known is printed" for word in _WORDS if word in str(row).casefold())
    yield from _command(row)
    if row["verdict"] == "open":
        extra = sorted({"figure", "numbers", "machine", "date"} & row.keys())
        if extra:
            yield f"is open, and has {', '.join(extra)}; give it a verdict, or take them out"
    elif row["verdict"] in VERDICTS:
        yield from _measured(row, machines)


def _command(row: Mapping[str, Any]) -> Iterator[str]:
    claim = claim_from(row, {}, {})
    known = not claim.command or re.match(r"halfstep |python (benchmarks|examples/papers)/\w+\.py\b", claim.command)
    if not known and claim.check != row["id"]:
        yield (
            f"command {claim.command!r}: expected halfstep ..., python benchmarks/NAME.py ... "
            f"or examples/papers/NAME.py ..., or python -m halfstep.claims.checks {row['id']}"
        )
    if claim.short and claim.check is None:
        yield f"seconds = {claim.seconds:g}: a row under {SHORT:g} seconds runs a check, whose numbers can be compared"
    if row["verdict"] != "open" and not claim.numbers:
        yield "records no numbers; write what was measured under numbers, so that it can be compared"
    for name, number in claim.numbers.items():
        if claim.check and number.kept:
            yield f"numbers.{name}.kept: the row's check measures its numbers; take it out"
        elif not claim.check and not (len(number.kept) > 1 and all(isinstance(key, str) for key in number.kept)):
            yield f"numbers.{name} is measured by no check; kept = [file, key, ...] says where its benchmark keeps it"


def _measured(row: Mapping[str, Any], machines: Mapping[str, str]) -> Iterator[str]:
    shown = {field.split(".")[0] for _, field, _, _ in string.Formatter().parse(row["figure"]) if field}
    for name in sorted(shown ^ row.get("numbers", {}).keys()):
        yield f"number {name!r} stands in only one of figure and numbers; expected in both"
    for found in re.findall(r"(\w*)[ (]*\{\w*_least[^{]*\{\w*_most", row["figure"]):
        if found not in ("seeds", "cases"):
            yield "a least and a greatest number stand as (a to b), as an interval does; write (seeds {a} to {b})"
    if row["machine"] not in machines:
        yield unknown("machine", row["machine"], machines)
    try:
        date.fromisoformat(row["date"])
    except ValueError:
        yield f"date {row['date']!r}: expected YYYY-MM-DD"
