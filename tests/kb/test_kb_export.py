"""Exports hold the knowledge base's contents, and hostile text in them stays text."""

import csv
import io
import json
import re
from dataclasses import asdict, replace

import pytest
import yaml

from halfstep.errors import KnowledgeBaseError
from halfstep.kb import KnowledgeBase
from halfstep.kb.export import escaped, model_card, to_csv, to_json, to_markdown
from halfstep.kb.resolve import find


HOSTILE = (
    '</script><script>alert(1)</script><img src=x onerror=alert(1)> & "q" \' | `c` [a](javascript:alert(1)) {{ 7 * 7 }}'
)


def hostile(base):
    entry = next(entry for entry in base.entries if entry.id == "flan-t5")
    report = next(report for report in base.failures if "flan-t5" in report.entries)
    bad = replace(
        entry,
        paraphrase=HOSTILE,
        notes=HOSTILE,
        aliases=(HOSTILE,),
        family=HOSTILE,
        risky={"fp16": HOSTILE},
        hardware=HOSTILE,
    )
    bad = replace(bad, references=(replace(bad.references[0], locator=HOSTILE),), keep_in_fp32=(HOSTILE,))
    return KnowledgeBase((bad,), (replace(report, symptom=HOSTILE, model=HOSTILE, tried=HOSTILE),))


def test_json_export_is_complete(base):
    data = json.loads(to_json(base))
    assert data["counts"] == base.counts()
    assert len(data["failures"]) == len(base.failures)
    for entry, found in zip(base.entries, data["entries"], strict=True):
        assert {name: found[name] for name in asdict(entry)} == json.loads(json.dumps(asdict(entry)))
        assert (found["compute"], found["regime"]) == (entry.compute, entry.regime)


def test_csv_export_is_read_back(base):
    rows = list(csv.DictReader(io.StringIO(to_csv(base))))
    for entry, row in zip(base.entries, rows, strict=True):
        assert (row["id"], row["family"], int(row["year"])) == (entry.id, entry.family, entry.year)
        assert row["train_precision"] == entry.train_precision
        assert tuple(row["model_ids"].split("\n")) == (entry.model_ids or ("",))
        assert row["paraphrase"] == entry.paraphrase
        assert (row["notes"] or None) == entry.notes
        assert dict(line.split(": ", 1) for line in row["parts"].split("\n") if line) == entry.parts
        cited = [line.split(" ", 2) for line in row["references"].split("\n")]
        assert cited == [[each.kind, each.url, each.locator] for each in entry.references]


def cells(line):
    return [
        re.sub(r"\\(.)", r"\1", cell) for cell in re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
    ]


def test_markdown_export_is_read_back(base):
    lines = [line for line in to_markdown(base).split("\n") if line.startswith("| ")]
    entries = lines[2 : 2 + len(base.entries)]
    for entry, line in zip(base.entries, entries, strict=True):
        row = cells(line)
        assert len(row) == 9
        assert row[:3] == [entry.id, entry.family, str(entry.year)]
        assert row[6] == "<br>".join((*entry.model_ids, *entry.aliases))
        assert row[7] == entry.paraphrase
        assert all(f"](<{reference.url}>)" in row[8] for reference in entry.references)
    assert len(lines) == 4 + len(base.entries) + len(base.failures)


def test_markdown_escapes_html_and_links(base):
    shown = to_markdown(hostile(base))
    (line,) = [line for line in shown.split("\n") if "flan" in line and line.count("<br>")]
    assert len(cells(line)) == 9
    assert "<script" not in shown.replace("\\<script", "")
    assert "](javascript" not in shown.replace("\\](javascript", "")


@pytest.mark.parametrize("character", "\\`*_[]<>|#&~!")
def test_markdown_escapes_every_special_character(character):
    assert escaped(f"a{character}b") == f"a\\{character}b"


class TestModelCard:
    def test_entries_without_conflict_give_valid_yaml(self, base):
        for entry in base.entries:
            if entry.conflict_with:
                continue
            data = yaml.safe_load(model_card(find(base, entry.id)))
            assert data["trained_precision"] == (entry.parts or entry.train_precision)
            assert data["trained_precision_tier"] == entry.tier
            assert set(data["trained_precision_references"]) == {reference.url for reference in entry.references}
            assert tuple(data.get("trained_precision_kept_higher", ())) == entry.higher_precision_parts
            assert data.get("trained_precision_master_weights") == entry.master_weight_dtype

    def test_hostile_text_stays_text(self, base):
        entry = next(entry for entry in base.entries if entry.id == "flan-t5")
        bad = replace(
            entry, higher_precision_parts=(HOSTILE, "a: b", "- c", "#d", "\x1b"), master_weight_dtype="x\ny: z"
        )
        data = yaml.safe_load(model_card(find(KnowledgeBase((bad,), ()), "flan-t5")))
        assert tuple(data["trained_precision_kept_higher"]) == bad.higher_precision_parts
        assert data["trained_precision_master_weights"] == "x\ny: z"
        assert "y" not in data

    def test_conflicts_and_unknown_models_raise(self, base):
        with pytest.raises(KnowledgeBaseError, match="entries pegasus-large and pegasus-wiki conflict"):
            model_card(find(base, "google/pegasus-xsum"))
        with pytest.raises(KnowledgeBaseError, match=r"a card must not guess\. Nearest names: google/flan-t5-xxl"):
            model_card(find(base, "me/flan-t5-xxl"))
