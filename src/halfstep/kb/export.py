"""The knowledge base as JSON, CSV or Markdown, and a model's entry as a field of a model card."""

import csv
import io
import json
import re
from dataclasses import asdict, fields
from typing import Any

from halfstep.errors import KnowledgeBaseError
from halfstep.kb.reader import Entry, KnowledgeBase
from halfstep.kb.resolve import Answer
from halfstep.kb.verdict import casts
from halfstep.text import markdown_table


_COLUMNS = [*(each.name for each in fields(Entry) if each.name not in ("origin", "overlay")), "compute", "regime"]


def entry_data(entry: Entry) -> dict[str, Any]:
    """An entry as plain data, with the compute type and the regime as separate fields."""
    return {**asdict(entry), "compute": entry.compute, "regime": entry.regime}


def to_data(base: KnowledgeBase) -> dict[str, Any]:
    """The whole knowledge base as plain data: the counts by tier, the entries, the failure reports, the cast table."""
    return {
        "counts": base.counts(),
        "entries": [entry_data(entry) for entry in base.entries],
        "failures": [asdict(report) for report in base.failures],
        "casts": [{**asdict(cast), "verdict": cast.verdict} for cast in casts().values()],
    }


def to_json(base: KnowledgeBase) -> str:
    """The whole knowledge base as JSON."""
    return json.dumps(to_data(base), indent=2) + "\n"


def to_csv(base: KnowledgeBase) -> str:
    """One line per entry; a field with several values has one per line, "name: value" if they have names."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for entry in base.entries:
        cited = [f"{reference.kind} {reference.url} {reference.locator}" for reference in entry.references]
        writer.writerow({key: _cell(value) for key, value in {**entry_data(entry), "references": cited}.items()})
    return out.getvalue()


def to_markdown(base: KnowledgeBase) -> str:
    """The entries and the failure reports as two tables."""
    counts = base.counts()
    entries = [
        (
            *map(
                escaped,
                (
                    entry.id,
                    entry.family,
                    str(entry.year),
                    "; ".join(f"{part}: {word}" for part, word in entry.parts.items()) or entry.train_precision,
                    entry.tier,
                    entry.evidence_kind,
                ),
            ),
            "<br>".join(map(escaped, entry.model_ids + entry.aliases)),
            escaped(entry.paraphrase),
            "<br>".join(f"[{escaped(reference.locator)}](<{reference.url}>)" for reference in entry.references),
        )
        for entry in base.entries
    ]
    failures = [
        (
            *map(escaped, (report.model, report.trained_in, report.tried, report.symptom)),
            f"[{escaped(report.locator)}](<{report.url}>)",
        )
        for report in base.failures
    ]
    head = ("entry", "family", "year", "trained in", "tier", "evidence", "models", "says", "references")
    return "\n".join(
        [
            "# In which precision was this model pre-trained?",
            "",
            f"{counts['definitive']} definitive entries; {counts['inferred']} inferred ones, which are weaker.",
            "",
            *markdown_table(head, entries),
            "",
            "## Failure reports",
            "",
            *markdown_table(("model", "trained in", "tried", "symptom", "reference"), failures),
            "",
        ]
    )


def escaped(text: str) -> str:
    r"""Text escaped so that Markdown shows it unchanged, inside a table too.

    >>> print(escaped("a | <b> *c*"))
    a \| \<b\> \*c\*
    """
    return re.sub(r"([\\`*_\[\]<>|#&~!])", r"\\\1", text)


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {text}" for name, text in value.items())
    return "\n".join(value) if isinstance(value, list | tuple) else value


def model_card(answer: Answer) -> str:
    """Lines for the YAML header of a model card: the precision, its certainty, and its references.

    The name `trained_precision` is the one proposed for config.json in huggingface/transformers#11209. Strings are JSON
    strings, which YAML reads unchanged.

    Raises:
        KnowledgeBaseError: there is no entry, or entries conflict; a card states one value.
    """
    if not answer.known:
        near = f" Nearest names: {', '.join(answer.near)}." if answer.near else ""
        raise KnowledgeBaseError(
            f"no entry for {answer.model_id!r}, and a card must not guess.{near} If you trained it, add your own "
            "entry: halfstep kb add"
        )
    if answer.conflict:
        ids = " and ".join(entry.id for entry in answer.entries)
        raise KnowledgeBaseError(
            f"entries {ids} conflict over {answer.model_id!r}, and a card says one thing. Read both with "
            f"`halfstep kb show {answer.model_id}`; a reference that settles it is welcome"
        )
    return "\n".join(_lines(answer.entries[0], answer.tier or "inferred"))


def _lines(entry: Entry, tier: str) -> list[str]:
    parts = [f"  {json.dumps(part)}: {word}" for part, word in entry.parts.items()]
    kept = [f"  - {json.dumps(part)}" for part in entry.higher_precision_parts]
    master = entry.master_weight_dtype
    urls = dict.fromkeys(reference.url for reference in entry.references)
    return [
        *(["trained_precision:", *parts] if parts else [f"trained_precision: {entry.train_precision}"]),
        f"trained_precision_tier: {tier}",
        *(["trained_precision_kept_higher:", *kept] if kept else []),
        *([f"trained_precision_master_weights: {json.dumps(master)}"] if master else []),
        "trained_precision_references:",
        *(f"  - {json.dumps(url)}" for url in urls),
    ]
