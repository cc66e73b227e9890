"""The knowledge base's rules: every violation has a message, and permitted exceptions have none."""

from dataclasses import replace

import pytest
from toy_entry import ENTRY

from halfstep.errors import KnowledgeBaseError
from halfstep.kb import FailureReport, KnowledgeBase, Reference, load
from halfstep.kb.add import rule_problems, validate
from halfstep.kb.reader import Entry, parse


TOY = Entry(
    id="toy",
    family="Toy",
    year=2024,
    stage="pretrain",
    train_precision="bf16_mixed",
    tier="definitive",
    evidence_kind="paper",
    paraphrase="Says bf16.",
    references=(Reference("paper", "https://arxiv.org/abs/2401.00001", "section 3"),),
    model_ids=("toys/toy-1b",),
    origin="toy.toml",
)
OTHER = replace(TOY, id="other", family="Other", model_ids=("others/other",), origin="other.toml")


def problems_of(*entries, failures=()):
    return list(rule_problems(KnowledgeBase(entries, failures)))


def assert_problem(message, *entries):
    found = problems_of(*entries)
    assert any(message in each for each in found), found


def test_valid_entries_have_no_problem():
    assert problems_of(TOY, OTHER) == []


def test_entry_without_an_official_source_is_a_problem():
    thread = (Reference("forum", "https://discuss.huggingface.co/t/1", "a post"),)
    assert_problem("nothing shows that this is an official model", replace(TOY, references=thread))
    assert problems_of(replace(TOY, references=thread, official="https://arxiv.org/abs/2401.00001")) == []


def test_secondary_evidence_is_not_definitive():
    weak = replace(TOY, evidence_kind="secondary")
    assert_problem("evidence of kind 'secondary' cannot be definitive", weak)
    assert problems_of(replace(weak, tier="inferred")) == []


def test_second_entry_for_a_model_needs_a_conflict_declared_in_both():
    second = replace(OTHER, model_ids=("toys/TOY-1b",))
    assert_problem("toys/toy-1b stands in entry 'toy' (toy.toml) already. One entry per model", TOY, second)
    half = replace(second, conflict_with="toy")
    assert_problem(
        "conflict_with names 'toy', which does not name this entry back; add conflict_with = \"other\"", TOY, half
    )
    assert problems_of(replace(TOY, conflict_with="other"), half) == []


def test_second_entry_of_equal_family_and_precision_needs_a_reason():
    second = replace(OTHER, family="Toy")
    assert_problem(
        "has entry 'toy' with the same precision, bf16_mixed. Join them, or say in `reason` why", TOY, second
    )
    assert problems_of(TOY, replace(second, reason="the large sizes, trained later")) == []
    assert problems_of(TOY, replace(second, train_precision="fp32")) == []


def test_glob_that_matches_another_entry_is_a_problem():
    wide = replace(OTHER, model_ids=("toys/toy-*",))
    assert_problem("the glob 'toys/toy-*' swallows 'toys/toy-1b' of entry 'toy' (toy.toml); narrow the glob", wide, TOY)
    assert_problem("the glob 'toys/toy-*' swallows 'toys/toy-1b' of entry 'toy' (toy.toml); narrow the glob", TOY, wide)
    assert problems_of(TOY, replace(wide, except_ids=("toys/toy-1b",))) == []


def test_glob_that_covers_a_narrower_glob_is_a_problem():
    narrow = replace(TOY, model_ids=("toys/toy-small-*",))
    assert_problem("swallows 'toys/toy-small-*'", narrow, replace(OTHER, model_ids=("toys/toy-*",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_ids": ()}, "names no model; expected model_ids or aliases"),
        ({"except_ids": ("toys/x",)}, "except_ids has 'toys/x', which no glob of model_ids would match; take it out"),
        ({"id_confirmed": ("toys/x",)}, "id_confirmed has 'toys/x', which is not one of model_ids"),
        (
            {"parts": {"a": "fp32", "b": "fp16_mixed"}},
            'train_precision = "mixed_by_part" and [entry.parts] go together',
        ),
        ({"train_precision": "mixed_by_part"}, 'train_precision = "mixed_by_part" and [entry.parts] go together'),
        ({"safe": {"fp16": "yes"}, "risky": {"fp16": "no"}}, "fp16 stands in both [entry.safe] and [entry.risky]"),
        ({"conflict_with": "tay"}, "conflict_with: unknown entry 'tay'; nearest: toy"),
        (
            {"references": (Reference("code", "https://github.com/a/b/blob/main/c.py", "line 3", "0123abcd"),)},
            "does not contain its commit '0123abcd'; link to that commit",
        ),
    ],
    ids=str,
)
def test_inconsistent_fields_are_a_problem(change, message):
    assert_problem(message, replace(TOY, **change))


def test_duplicate_ids_are_a_problem():
    assert_problem("an entry of this id stands in toy.toml already", TOY, replace(OTHER, id="toy"))


def test_report_must_name_an_existing_entry():
    report = FailureReport(
        "r", "failure", "https://x.y/z", "x#1", "toy", "bf16", "fp16", ("fp16",), "NaN", entries=("tay",)
    )
    assert any("unknown entry 'tay'; nearest: toy" in each for each in problems_of(TOY, failures=(report,)))
    fine = replace(report, entries=("toy",))
    assert problems_of(TOY, failures=(fine,)) == []
    assert any("another report has this id" in each for each in problems_of(TOY, failures=(fine, fine)))


def test_broken_toml_is_reported_with_its_line(overlay):
    folder = overlay(ENTRY.replace('"Says bf16."', '"Says bf16.'))
    (message,) = validate(folder, under=load(None))
    assert message.startswith("toy.toml: this is not TOML")
    assert "line 11" in message
    with pytest.raises(KnowledgeBaseError, match="line 1"):
        parse("family = \n", "x.toml")


def test_validate_reports_every_broken_file_at_once(overlay):
    overlay("x = [", name="a.toml")
    folder = overlay(ENTRY.replace("bf16_mixed", "bf61_mixed"), name="b.toml")
    found = validate(folder, under=load(None))
    assert len(found) == 2
    assert found[0].startswith("a.toml: this is not TOML")
    assert found[1].startswith("b.toml: entry 'toy'")


@pytest.mark.parametrize(
    ("text", "family", "message"),
    [
        (ENTRY, None, "'family' is missing at the top of the file"),
        ("", "Toy", "found neither an [[entry]] nor a [[failure]]"),
        ("colour = 'red'\n" + ENTRY, "Toy", "unknown key 'colour' at the top of the file"),
        ("[entry]\nid = 'x'\n", "Toy", "entry: found a single table; expected [[entry]], with two brackets"),
        (ENTRY.replace('id = "toy"\n', ""), "Toy", "entry 'without an id': entry: 'id' is missing"),
        (ENTRY, "T\\u001boy", r"family: found 'T\x1boy', expected one line of text"),
    ],
    ids=str,
)
def test_malformed_file_is_reported(overlay, text, family, message):
    found = validate(overlay(text, family=family), under=load(None))
    assert any(message in each for each in found), found


def test_overlay_may_declare_a_conflict_one_sidedly(overlay):
    text = ENTRY.replace("toys/toy-1b", "google/flan-t5-xxl").replace("year", 'conflict_with = "flan-t5"\nyear', 1)
    assert validate(overlay(text), under=load(None)) == []
