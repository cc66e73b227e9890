"""The ledger in words: one claim for the terminal, all of it as data, and as the page docs/claims.md."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from halfstep.claims.claim import READ, RESULTS, VERDICTS, Claim
from halfstep.grouping import grouped
from halfstep.printable import markdown_table


_INTRODUCTION = """\
# What we re-measured

Claims of papers, slides and forums that halfstep touches, each with the command that measures it again on your
machine. A figure stands beside the size it was measured at: most are far smaller than the source's. In brackets after a
number, (a to b) is its 95% interval; (seeds a to b) are the least and the greatest of the seeds, or of the cases.

`halfstep claims` lists them and `halfstep claims --run ID` measures one again. `make claims` measures all that take
under a minute, and compares the others with what benchmarks keep in `benchmarks/results`: it fails where a number lies
outside the tolerance recorded with it.

To add one, write a `[[claim]]` in `src/halfstep/claims/claims.toml`, with a verdict of `open` until there is a figure.
A short computation is a function under `@check("your-id")` in `src/halfstep/claims/checks/` that returns its numbers;
anything longer is a `halfstep` command or a benchmark, and its numbers say in which kept file they stand. `make docs`
rewrites this page, and the tests hold every row to the rules in `tests/claims/claim_rules.py`.
"""


def as_data(claim: Claim) -> dict[str, Any]:
    """A claim as plain data, with its figure in words."""
    data = {key: value for key, value in asdict(claim).items() if key != "template"}
    return {**data, "figure": claim.figure, "short": claim.short}


def describe(claim: Claim, width: int = 105) -> str:
    """A claim whole, a field after the other, in lines of that width."""
    body = "\n".join(
        textwrap.fill(
            text,
            width,
            initial_indent=f"  {label:<12} ",
            subsequent_indent=" " * 15,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for label, text in _fields(claim)
    )
    return f"{claim.id}: {claim.verdict}\n{body}"


def markdown(claims: Sequence[Claim]) -> str:
    """The page."""
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    verdicts = markdown_table(("verdict", "claims", "meaning"), ((v, str(counts[v]), VERDICTS[v]) for v in VERDICTS))
    parts = [_INTRODUCTION, *verdicts, "", *map(_link, by_subject(claims)), ""]
    for subject, rows in by_subject(claims).items():
        cells = ((f"[`{claim.id}`](#{claim.id})", claim.verdict, claim.claim) for claim in rows)
        table = markdown_table(("id", "verdict", "claim"), cells)
        parts += [f"## {subject}\n", *table, "", *map(_section, rows)]
    return "\n".join(parts)


def by_subject(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    """The claims under their subjects, both in the order in which they come."""
    return grouped((claim.subject, claim) for claim in claims)


def _link(subject: str) -> str:
    """A line of the page's contents; the anchor is the one that GitHub gives the heading."""
    anchor = "".join(c for c in subject.lower().replace(" ", "-") if c.isalnum() or c in "-_")
    return f"- [{subject}](#{anchor})"


def _fields(claim: Claim) -> list[tuple[str, str]]:
    fields = [
        ("claim", claim.claim),
        ("reference", f"{claim.reference} ({READ[claim.reference.read]})"),
        ("conditions", claim.conditions),
        ("figure", claim.figure or "none yet"),
        ("measured on", f"{claim.machine}; {claim.date}" if claim.figure else ""),
        ("kept in", ", ".join(f"{RESULTS}/{file}" for file in claim.files)),
        ("command", claim.command),
        ("note", claim.note),
    ]
    return [(label, text) for label, text in fields if text]


def _section(claim: Claim) -> str:
    items = "\n".join(
        f"- *{label}*: `{text}`" if label == "command" else f"- *{label}*: {_plain(text)}"
        for label, text in _fields(claim)
    )
    return f"### {claim.id}\n\n**{claim.verdict}**\n\n{items}\n"


def _plain(text: str) -> str:
    """The text with what Markdown would take for markup kept as it is."""
    return text.replace("*", r"\*").replace("<", r"\<").replace("_", r"\_").replace("|", r"\|")
