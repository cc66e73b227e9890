"""The results of a run, as one table with missed bars first, and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from on_gpu.bars import Verdict, judge
from on_gpu.journal import PROCESS


_ORDER = ("missed", "not measured", "not judged", "met")


def summary(rows: Mapping[tuple[str, str], Mapping[str, Any]], dry: bool, sections: Iterable[str]) -> dict[str, Any]:
    """The machine, verdicts and rows of a run.

    Args:
        rows: from the journal.
        dry: whether nothing was measured, so that figures only show that the code runs.
        sections: those asked for; a bar whose row is in another section is still listed, as not measured.
    """
    rows = compared(rows)
    machine = rows.get(("machine", "versions"), {})
    device = str(machine.get("gpu") or "no GPU")
    ended = {section: row["failed"] for (section, name), row in rows.items() if name == PROCESS and "failed" in row}
    verdicts = list(judge({name: row for (_, name), row in rows.items()}, device, ended))
    return {
        "dry": dry,
        "machine": {key: value for key, value in machine.items() if key not in ("section", "row")},
        "sections": list(sections),
        "bars": [
            {
                "row": v.bar.row, "measure": v.bar.measure, "at": v.bar.at, "bar": v.bar.on(device),
                "shape": v.bar.shape, "value": v.value, "verdict": "dry run" if dry else v.word,
                "why": v.why,
            }
            for v in verdicts
        ],
        "rows": list(rows.values()),
        "text": "\n".join(_lines(rows, verdicts, device, dry)),
    }  # fmt: skip


def page(found: Mapping[str, Any]) -> str:
    """The table of bars for a page, from the JSON of `summary`: figures measured, with missed bars first."""
    lines = ["| | row | measure | found | bar | at |", "| --- | --- | --- | --- | --- | --- |"]
    for bar in sorted(found["bars"], key=lambda bar: _ORDER.index(bar["verdict"])):
        sign = "at least" if bar["at"] == ">=" else "at most"
        value = "" if bar["value"] is None else f"{bar['value']:.3g}"
        shape = bar["why"].split(";")[0].removeprefix("at ") if bar["verdict"] == "not judged" else bar["shape"]
        lines.append(
            f"| {bar['verdict']} | {bar['row']} | {bar['measure']} | {value} | {sign} {bar['bar']:g} | {shape} |"
        )
    return "\n".join(line for line in lines if not line.startswith("| not measured"))


def compared(rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows, with those of training extended by ratios to bf16-mixed: of rows of one kind and shape, measured by one
    process or several."""
    found = {key: dict(row) for key, row in rows.items()}
    for (section, name), row in found.items():
        kind, _, _ = name.partition(": ")
        base = found.get((section, f"{kind}: bf16-mixed"), {})
        for measure in ("tokens/s", "peak bytes", "largest batch"):
            ours, theirs = (each.get("measures", {}).get(measure) for each in (row, base))
            if ours is not None and theirs and row.get("shape") == base.get("shape"):
                word = "times bf16-mixed" if measure == "tokens/s" else f"{measure}, times bf16-mixed"
                row["measures"] = row["measures"] | {word: ours / theirs}
    return found


def _lines(
    rows: Mapping[tuple[str, str], Mapping[str, Any]], verdicts: list[Verdict], device: str, dry: bool
) -> Iterator[str]:
    if dry:
        yield "DRY RUN: tiny sizes and a timer that times nothing. No figure below is a measurement."
    yield f"== correctness, {device}"
    for (section, name), row in rows.items():
        if section == "correctness":
            yield f"{name}: {row.get('failed') or row.get('result', '')}"
    counts = {word: sum(v.word == word for v in verdicts) for word in _ORDER}
    yield "== bars: " + ", ".join(f"{count} {word}" for word, count in counts.items())
    yield f"{'verdict':<13} {'row':<44} {'measure':<44} {'found':>9} {'bar':>9}"
    for verdict in sorted(verdicts, key=lambda v: _ORDER.index(v.word)):
        yield _line(verdict, device, "dry run" if dry else verdict.word)
    yield "== rows without a bar"
    barred = {v.bar.row for v in verdicts}
    for (section, name), row in rows.items():
        if name not in barred and section not in ("correctness", "machine"):
            figures = ", ".join(f"{key} {_short(value)}" for key, value in row.get("measures", {}).items())
            yield f"{section if name == PROCESS else name}: {row.get('failed') or row.get('result') or figures}"


def _line(verdict: Verdict, device: str, word: str) -> str:
    bar, number = verdict.bar, verdict.bar.on(device)
    wanted = "" if number is None else f"{bar.at} {number:g}"
    line = f"{word:<13} {bar.row:<44} {bar.measure:<44} {_short(verdict.value):>9} {wanted:>9}"
    budget = f"  [{bar.note} instructions an element]" if bar.note and verdict.word == "missed" else ""
    return line + budget + (f"  {verdict.why}" if verdict.why else "")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
