"""Printed text: no control characters reach the terminal, and every part of an entry is printed."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from halfstep.kb import KnowledgeBase
from halfstep.kb.resolve import find
from halfstep.kb.verdict import describe_answer, describe_entry, describe_verdict, judge
from halfstep.text import printable


HOSTILE = [
    "\x1b[2J\x1b[31mgone",
    "safe\rrisky",
    "a\x08b",
    "\x9b31m",
    "\u202eevil",
    "\u2066x\u2069",
    "\ud800",
    "a\u200bb",
    "x\nsafe",
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_control_characters_are_escaped(text):
    shown = printable(text)
    assert shown.isprintable()
    assert "\\" in shown


@given(st.text())
def test_printable_is_idempotent_and_keeps_printable_text(text):
    shown = printable(text)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)
    shown.encode("utf-8")
    assert printable(shown) == shown
    if all(character.isprintable() for character in text):
        assert shown == text


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_control_characters_in_entries_are_escaped(base, text):
    entry = next(entry for entry in base.entries if entry.id == "flan-t5")
    report = next(report for report in base.failures if "flan-t5" in report.entries)
    bad = replace(
        entry,
        paraphrase=text,
        notes=text,
        hardware=text,
        aliases=(text,),
        keep_in_fp32=(text,),
        risky={"fp16": text},
        references=tuple(replace(reference, locator=text, url=text) for reference in entry.references),
    )
    hostile = KnowledgeBase((bad,), (replace(report, symptom=text, model=text, note=text),))
    answer = find(hostile, "google/flan-t5-xxl")
    for shown in (
        describe_entry(bad),
        describe_answer(answer),
        describe_verdict(judge(hostile, "google/flan-t5-xxl", "fp16")),
        describe_verdict(judge(hostile, text, "fp16")),
    ):
        assert all(line.isprintable() for line in shown.split("\n"))
        assert not any(line.startswith("safe") for line in shown.split("\n"))


def test_described_entry_is_complete(base):
    for entry in base.entries:
        shown = describe_entry(entry)
        for wanted in (entry.paraphrase, entry.tier, *entry.model_ids, *entry.aliases, *entry.higher_precision_parts):
            assert wanted in shown
        for reference in entry.references:
            assert reference.url in shown
            assert reference.locator in shown
        assert ("an excerpt: open the references" in shown) == (entry.read_via == "excerpt")
        assert shown.count("(id unconfirmed)") == len(entry.model_ids) - len(entry.id_confirmed)


def test_described_verdict_names_its_references(base):
    shown = describe_verdict(judge(base, "google/flan-t5-xxl", "fp16"), ["measure it"])
    lines = shown.split("\n")
    assert lines[0] == "risky: google/flan-t5-xxl in fp16"
    assert "trained in bf16_mixed: " in shown
    assert "keep in fp32: " in shown
    assert "https://huggingface.co/google/flan-t5-xxl/discussions/5/files" in shown
    assert "https://github.com/huggingface/transformers/issues/23918" in shown
    assert lines[-1] == "  measure it"


def test_described_conflict_shows_both_entries(base):
    shown = describe_answer(find(base, "google/pegasus-xsum"))
    assert "the entries conflict" in shown
    assert "\npegasus-large\n" in shown
    assert "\npegasus-wiki\n" in shown


def test_stored_dtype_is_described_as_no_evidence(base, tmp_path):
    (tmp_path / "config.json").write_text('{"torch_dtype": "float16"}')
    shown = describe_verdict(judge(base, str(tmp_path), "fp16"))
    assert "stored as float16, says config.json; that is no evidence" in shown
    assert "stored" not in describe_verdict(judge(base, "foo/bar", "fp16"))
