"""The tab of the knowledge base: its entries, and the answers of its checker."""

from __future__ import annotations

from collections import Counter
from typing import Any

from halfstep.kb.casts import table
from halfstep.kb.descriptions import because
from halfstep.kb.reader import KnowledgeBase
from halfstep.kb.schema import uses
from halfstep.kb.verdict import Verdict, judge, most_careful
from halfstep.printable import printable


_Said = tuple[str, tuple[int, ...], tuple[str, ...]]
"""A verdict, the numbers of the texts that say why, and what to keep in fp32."""


def facts(base: KnowledgeBase) -> dict[str, Any]:
    """What kb.html is written from."""
    return {
        "entries": sorted(base.entries, key=lambda entry: (-entry.year, entry.family.casefold(), entry.id)),
        "failures": base.failures,
        "reports": {
            entry.id: [report for report in base.failures if entry.id in report.entries] for entry in base.entries
        },
        "counts": base.counts(),
        "precisions": Counter(kind for entry in base.entries for kind in entry.computes),
        "evidence": Counter(entry.evidence_kind for entry in base.entries),
        "years": sorted({entry.year for entry in base.entries}, reverse=True),
        "uses": uses(),
        "natives": list(dict.fromkeys(native for native, _ in table())),
        "cells": table(),
    }


def checker(base: KnowledgeBase) -> dict[str, Any]:
    """What the page's cast checker answers from: every verdict is `judge`'s, none is made in the page."""
    texts: dict[str, int] = {}
    said: dict[_Said, int] = {}
    answers: dict[tuple[str, ...], dict[str, Any]] = {}
    names: dict[str, tuple[int, str]] = {}
    globs: list[tuple[str, list[str], int]] = []
    for entry in base.entries:
        for name in (*entry.model_ids, entry.id, *entry.aliases):
            verdicts = {use: judge(base, name, use) for use in uses()}
            found = verdicts["fp32"].answer
            key = tuple(sorted(each.id for each in found.entries))
            if key not in answers:
                numbers = [said.setdefault(_said(verdict, texts), len(said)) for verdict in verdicts.values()]
                answers[key] = {"entries": [each.id for each in found.entries], "tier": found.tier, "said": numbers}
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
    ways: dict[tuple[int, str], list[str]] = {}
    for name, way in names.items():
        ways.setdefault(way, []).append(name)
    listed = {
        "names": [[*way, called] for way, called in ways.items()],
        "answers": list(answers.values()),
        "said": list(said),
        "texts": list(texts),
    }
    return {"uses": uses(), "globs": globs, **listed, "reports": reports}


def _said(verdict: Verdict, texts: dict[str, int]) -> _Said:
    """What the entries say; the page adds the reports of failures, which depend on the name."""
    own = [reason for reason in verdict.reasons if reason.entry is not None] or list(verdict.reasons)
    lines = map(because, own)
    numbers = tuple(texts.setdefault(printable(line), len(texts)) for line in dict.fromkeys(lines))
    return most_careful(own), numbers, tuple(printable(part) for part in verdict.keep_in_fp32)
