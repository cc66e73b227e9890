"""A row of the ledger: a claim, its source, our measurement, and the verdict; from TOML, as text, as Markdown."""

import shlex
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from halfstep.errors import ClaimError, one_of
from halfstep.text import grouped, markdown_table


VERDICTS = {
    "holds": "what we measured agrees, at the size given",
    "in part": "a part of the claim, or the claim under a condition it does not state",
    "not at this size": "the effect does not appear in models as small as ours",
    "contradicted": "what we measured says otherwise",
    "cannot tell": "measured, and the seeds lie further apart than what is compared",
    "open": "not measured yet",
}
"""The meaning of each verdict."""

READ = {
    "text": "the text was read",
    "abstract": "the abstract was read",
    "code": "the code and its documentation were read",
    "secondary": "secondary: from notes and slides about it",
}
"""Which part of a source was read."""

CHECKS = "halfstep.claims.checks"
"""The module that runs a check: `python -m halfstep.claims.checks ID`."""

RESULTS = "benchmarks/results"
"""The folder of a clone with the saved figures of its benchmarks, one JSON file each; an installed package has none."""

SHORT = 60.0
"""A row is short if its command takes less than this many seconds on two slow cores."""


@dataclass(frozen=True)
class Reference:
    """The source of a claim, and which part of it was read (a key of `READ`)."""

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
    """A measured value, and how far a repetition may differ from it."""

    value: float
    tolerance: float = 0.0
    kept: tuple[str, ...] = ()
    """The place in a benchmark's results: a file under `RESULTS`, then the keys; empty if the row's check measures
    it."""

    def agrees(self, measured: float) -> bool:
        """Whether a repetition with the result `measured` confirms it. NaN never does.

        >>> Number(0.8, tolerance=0.01).agrees(0.805), Number(16.0).agrees(16.5)
        (True, False)
        """
        return abs(measured - self.value) <= self.tolerance


@dataclass(frozen=True)
class Claim:
    """One row. An open row has no figure, and may have no command yet."""

    id: str
    subject: str
    """Its subject: a heading of the page."""
    claim: str
    reference: Reference
    conditions: str
    """The source's conditions."""
    verdict: str
    """A key of `VERDICTS`."""
    command: str = ""
    """The shell command that measures it again."""
    seconds: float | None = None
    """The time of the command on two slow cores."""
    template: str = ""
    """The figure in words, with {name} for each value."""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    machine: str = ""
    date: str = ""
    note: str = ""

    @property
    def figure(self) -> str:
        """Our figure in words, with its values."""
        return self.template.format(**{name: number.value for name, number in self.numbers.items()})

    @property
    def files(self) -> tuple[str, ...]:
        """The saved files that contain its values."""
        return tuple(dict.fromkeys(number.kept[0] for number in self.numbers.values() if number.kept))

    @property
    def short(self) -> bool:
        """Whether the command takes less than a minute on two slow cores."""
        return self.seconds is not None and self.seconds < SHORT

    @property
    def check(self) -> str | None:
        """The name of the check that the command runs; None if it is another command."""
        words = shlex.split(self.command)
        return words[3] if words[:3] == ["python", "-m", CHECKS] and len(words) == 4 else None


@cache
def data() -> Mapping[str, Any]:
    """The parsed file: the machines and the subjects by short name, and the rows."""
    return tomllib.loads(files("halfstep.claims").joinpath("claims.toml").read_text(encoding="utf-8"))


@cache
def load() -> tuple[Claim, ...]:
    """All claims, by subject. Tests check the rows with `rules.problems`."""
    order = list(data()["subject"].values())
    claims = (claim_from(row, data()["machine"], data()["subject"]) for row in data()["claim"])
    return tuple(sorted(claims, key=lambda claim: order.index(claim.subject)))


def get_claim(id: str) -> Claim:
    """The claim of that id.

    Raises:
        ClaimError: no claim has that id; the message suggests the nearest ones.
    """
    claims = {claim.id: claim for claim in load()}
    return claims[one_of("claim", id, claims, ClaimError)]


def claim_from(row: Mapping[str, Any], machines: Mapping[str, str], subjects: Mapping[str, str]) -> Claim:
    """A claim from its TOML table, which must keep the rules."""
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
    """A claim in full, one field after the other, wrapped to that width."""
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
    """The page docs/claims.md."""
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    verdicts = markdown_table(("verdict", "claims", "meaning"), ((v, str(counts[v]), VERDICTS[v]) for v in VERDICTS))
    parts = [_INTRODUCTION, *verdicts, "", *map(_link, by_subject(claims)), ""]
    for subject, rows in by_subject(claims).items():
        cells = ((f"[`{claim.id}`](#{claim.id})", claim.verdict, claim.claim) for claim in rows)
        parts += [f"## {subject}\n", *markdown_table(("id", "verdict", "claim"), cells), "", *map(_section, rows)]
    return "\n".join(parts)


def by_subject(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    """The claims grouped by subject, both in their order of occurrence."""
    return grouped((claim.subject, claim) for claim in claims)


def _link(subject: str) -> str:
    """A line of the page's contents; the anchor is GitHub's for the heading."""
    return f"- [{subject}](#{''.join(c for c in subject.lower().replace(' ', '-') if c.isalnum() or c in '-_')})"


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
    """The text with Markdown's special characters escaped."""
    return text.replace("*", r"\*").replace("<", r"\<").replace("_", r"\_").replace("|", r"\|")
