"""The knowledge base as one self-contained HTML page that works from a file, without a network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from importlib.resources import files
from typing import Any

from halfstep.errors import KnowledgeBaseError
from halfstep.kb.casts import table
from halfstep.kb.descriptions import because
from halfstep.kb.entry import FailureReport
from halfstep.kb.reader import KnowledgeBase
from halfstep.kb.schema import uses
from halfstep.kb.verdict import Verdict, judge, most_careful
from halfstep.printable import printable


try:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
except ModuleNotFoundError as error:
    raise KnowledgeBaseError(
        f"the HTML page is written with {error.name}, which is not installed; "
        "install it with pip install 'halfstep[lab]', or export json, csv or md"
    ) from error


def to_html(base: KnowledgeBase) -> str:
    """The page: search, filters, sorting, a cast checker and the safe-cast matrix.

    Every text of an entry is escaped. The page may run its own script and style only, which its content security
    policy names by their hashes, and may load nothing.
    """
    # autoescape for all: the texts come from whoever wrote an entry
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["printable"] = printable
    style, script = _part("page.css"), _part("page.js")
    natives = list(dict.fromkeys(native for native, _ in table()))
    return environment.from_string(_part("page.html")).render(
        entries=sorted(base.entries, key=lambda entry: (-entry.year, entry.family.casefold(), entry.id)),
        failures=base.failures,
        reports={entry.id: _reports(base, entry.id) for entry in base.entries},
        counts=base.counts(),
        precisions=Counter(kind for entry in base.entries for kind in entry.computes),
        evidence=Counter(entry.evidence_kind for entry in base.entries),
        years=sorted({entry.year for entry in base.entries}, reverse=True),
        names=sorted(
            {name for entry in base.entries for name in (*entry.model_ids, *entry.aliases) if "*" not in name}
        ),
        uses=uses(),
        natives=natives,
        cells=table(),
        style=Markup(style),
        script=Markup(script),
        data=Markup(_json(_checker(base))),
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
    )


def _checker(base: KnowledgeBase) -> dict[str, Any]:
    """What the page's cast checker answers from: every verdict is `judge`'s, none is made in the page."""
    texts: dict[str, int] = {}
    answers: dict[tuple[str, ...], dict[str, Any]] = {}
    names: dict[str, tuple[int, str]] = {}
    globs: list[tuple[str, list[str], int]] = []
    for entry in base.entries:
        for name in (*entry.model_ids, entry.id, *entry.aliases):
            verdicts = {use: judge(base, name, use) for use in uses()}
            found = verdicts["fp32"].answer
            key = tuple(sorted(each.id for each in found.entries))
            if key not in answers:
                said = {use: _said(verdict, texts) for use, verdict in verdicts.items()}
                answers[key] = {"entries": [each.id for each in found.entries], "tier": found.tier, "said": said}
            number = list(answers).index(key)
            if "*" in name:
                globs.append((name.lower(), [other.lower() for other in entry.except_ids], number))
            else:
                names.setdefault(name.lower(), (number, found.how))
    reports = [
        {
            "id": report.id,
            "kind": report.kind,
            "uses": report.uses,
            "entries": report.entries,
            "globs": [name.lower() for name in report.model_ids],
        }
        for report in base.failures
    ]
    return {"names": names, "globs": globs, "answers": list(answers.values()), "texts": list(texts), "reports": reports}


def _said(verdict: Verdict, texts: dict[str, int]) -> dict[str, Any]:
    """What the entries say; the page adds the reports of failures, which hang on the name."""
    own = [reason for reason in verdict.reasons if reason.entry is not None] or list(verdict.reasons)
    lines = map(because, own)
    numbers = [texts.setdefault(printable(line), len(texts)) for line in dict.fromkeys(lines)]
    return {"verdict": most_careful(own), "why": numbers, "keep": [printable(part) for part in verdict.keep_in_fp32]}


def _reports(base: KnowledgeBase, entry_id: str) -> list[FailureReport]:
    return [report for report in base.failures if entry_id in report.entries]


def _json(data: Any) -> str:
    """JSON that may stand in a <script> element: no character in it can end the element."""
    return (
        json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _part(name: str) -> str:
    return files("halfstep.kb.export").joinpath(name).read_text(encoding="utf-8")
