"""Entries and verdicts as plain text, with nothing in it that a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.kb.reader import Entry, FailureReport, Reference
from halfstep.kb.resolve import Answer
from halfstep.kb.verdict import Reason, Verdict
from halfstep.printable import printable


def describe_entry(entry: Entry) -> str:
    """An entry whole, one field a line."""
    ids = [name if entry.confirms(name) else f"{name} (id unconfirmed)" for name in entry.model_ids]
    rows = [
        ("family", f"{entry.family}, {entry.year}"),
        ("trained in", _trained_in(entry)),
        ("tier", f"{entry.tier} (evidence: {_words(entry.evidence_kind)})"),
        ("stage", _words(entry.stage)),
        ("read as", entry.excerpt_only and "an excerpt: open the references before quoting them"),
        ("says", entry.paraphrase),
        ("note", entry.notes),
        ("an entry of its own", entry.reason),
        ("master weights", entry.master_weight_dtype),
        ("optimizer state", entry.optimizer_state_dtype),
        ("gradient sums", entry.grad_accum_dtype),
        ("kept higher", ", ".join(entry.higher_precision_parts)),
        ("keep in fp32", ", ".join(entry.keep_in_fp32)),
        ("hardware", entry.hardware),
        ("framework", entry.framework),
        ("released as", entry.released_dtype and f"{entry.released_dtype} (storage; no evidence of training)"),
        ("conflicts with", entry.conflict_with),
        ("your own entry", entry.origin if entry.overlay else None),
        *((f"safe in {use}", reason) for use, reason in entry.safe.items()),
        *((f"risky in {use}", reason) for use, reason in entry.risky.items()),
        ("models", ", ".join((*ids, *entry.aliases))),
        ("official", entry.official),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows if value]
    return _text([entry.id, *_indented(lines), "references", *_indented(map(_cite, entry.references))])


def describe_answer(answer: Answer) -> str:
    """All entries that speak of a model, how they were found, and the failure reports."""
    blocks = [_text(_found(answer)), *(describe_entry(entry) for entry in answer.entries)]
    if answer.failures:
        blocks.append(_text(["failure reports", *_indented(map(_report, answer.failures))]))
    return "\n\n".join(blocks)


def describe_verdict(verdict: Verdict, more_steps: Iterable[str] = ()) -> str:
    """A verdict with its reasons, references, failure reports and what to do; `more_steps` are added to the last."""
    lines = [f"{verdict.verdict}: {verdict.model_id} in {verdict.use}", *_found(verdict.answer)]
    lines += map(because, verdict.reasons)
    if verdict.keep_in_fp32:
        lines += [f"keep in fp32: {', '.join(verdict.keep_in_fp32)}"]
    lists = {
        "references": [*map(_cite, verdict.references)],
        "on this cast in general": dict.fromkeys(source for reason in verdict.reasons for source in reason.sources),
        "failure reports": [*map(_report, verdict.failures)],
        "next": [*verdict.next_steps, *more_steps],
    }
    for title, items in lists.items():
        lines += [title, *_indented(items)] if items else []
    return _text(lines)


def because(reason: Reason) -> str:
    """One reason of a verdict, as a line."""
    if reason.entry is None:
        return reason.text
    who = f"{reason.part}: {reason.verdict}, trained in" if reason.part else "trained in"
    return f"{who} {reason.train_precision}: {reason.text}"


def _found(answer: Answer) -> list[str]:
    if not answer.known:
        lines = [f"no entry for {answer.model_id}"]
        if answer.near:
            lines.append(f"nearest names: {', '.join(answer.near)}")
        return lines + _folder(answer)
    ids = ", ".join(entry.id for entry in answer.entries)
    one = "entry" if len(answer.entries) == 1 else "entries"
    way = f"{one} {ids}, {answer.tier}, found by {answer.how} {', '.join(answer.matched)}"
    if answer.how == "exact id" and not answer.id_confirmed:
        way += " (hub id unconfirmed: no reference names it)"
    lines = [way]
    if answer.how == "base model":
        precisions = ", ".join(dict.fromkeys(map(_trained_in, answer.entries)))
        lines.append(f"base {', '.join(answer.matched)} was pre-trained in {precisions}; this one: not stated")
    if answer.conflict:
        lines.append("the entries conflict: all of them are shown, and the more careful advice counts")
    return lines + _folder(answer)


def _folder(answer: Answer) -> list[str]:
    if answer.stored_dtype is None:
        return []
    return [f"stored as {answer.stored_dtype}, says config.json; that is no evidence of how it was trained"]


def _trained_in(entry: Entry) -> str:
    if entry.parts:
        return "; ".join(f"{part} {precision}" for part, precision in entry.parts.items())
    return entry.train_precision


def _cite(reference: Reference) -> str:
    return f"{reference.kind}: {reference.locator}\n  {reference.url}"


def _report(report: FailureReport) -> str:
    note = f" ({report.note})" if report.note else ""
    return f"{report.kind}: {report.model} in {report.tried}: {report.symptom}{note}\n  {report.url}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _indented(items: Iterable[str]) -> list[str]:
    return [f"  {line}" for item in items for line in item.split("\n")]


def _text(lines: Iterable[str]) -> str:
    return "\n".join(printable(line) for line in lines)
