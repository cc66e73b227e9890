"""Adding an entry: it is read back as given, and a folder is never left with an entry that breaks a rule."""

import pytest
from hypothesis import given, strategies as st

from families import for_each
from halfstep.errors import KnowledgeBaseError
from halfstep.kb import load, lookup
from halfstep.kb.add import _lines, add_entry, dump_entry, slug, toml_string
from halfstep.kb.reader import data_files, package_folder, parse, text_of


GOOD = {
    "id": "toy",
    "year": 2024,
    "stage": "pretrain",
    "train_precision": "bf16_mixed",
    "tier": "definitive",
    "evidence_kind": "paper",
    "model_ids": ["toys/toy-1b"],
    "paraphrase": 'Says "bf16", in \\ section 3.',
    "references": [{"kind": "paper", "url": "https://arxiv.org/abs/2401.00001", "locator": "section 3"}],
}


def test_an_entry_is_read_back_as_given(tmp_path):
    file = add_entry("Toy Story", GOOD, tmp_path)
    assert file.name == "toy-story.toml"
    (entry,) = lookup("toys/toy-1b", tmp_path).entries
    assert (entry.family, entry.paraphrase, entry.overlay) == ("Toy Story", GOOD["paraphrase"], True)
    assert entry.references[0].locator == "section 3"


def test_a_second_entry_is_appended(tmp_path):
    add_entry("Toy", GOOD, tmp_path)
    file = add_entry("Toy", {**GOOD, "id": "toy-2", "model_ids": ["toys/2"], "train_precision": "fp32"}, tmp_path)
    assert [entry["id"] for entry in parse(text_of(file), "x")["entry"]] == ["toy", "toy-2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"references": []}, "expected at least one .*every entry cites what it rests on"),
        ({"train_precision": "bf61"}, "unknown word for entry.train_precision 'bf61'"),
        (
            {"model_ids": ["google/flan-t5-xxl"]},
            r"google/flan-t5-xxl stands in entry 'flan-t5' \(flan-t5\.toml\) already.*declare the conflict",
        ),
        ({"id": "flan-t5"}, r"an entry of this id stands in flan-t5\.toml already"),
        (
            {"model_ids": ["google/flan-*"]},
            r"the glob 'google/flan-\*' swallows 'google/flan-t5-small' of entry 'flan-t5'",
        ),
        ({"evidence_kind": "secondary"}, "cannot be definitive"),
        ({"conflict_with": "flan-t6"}, "unknown entry 'flan-t6'; nearest: flan-t5"),
    ],
    ids=str,
)
def test_what_breaks_a_rule_is_not_written(tmp_path, change, message):
    with pytest.raises(KnowledgeBaseError, match=message):
        add_entry("Toy", {**GOOD, **change}, tmp_path)
    assert data_files(tmp_path) == []


def test_a_refused_entry_leaves_the_file_as_it_was(tmp_path):
    before = text_of(add_entry("Toy", GOOD, tmp_path))
    with pytest.raises(KnowledgeBaseError, match="One entry per model"):
        add_entry("Toy", {**GOOD, "id": "toy-2", "train_precision": "fp32"}, tmp_path)
    assert text_of(tmp_path / "toy.toml") == before


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KnowledgeBaseError, match=r"cannot write .*toy\.toml.*--folder"):
        add_entry("Toy", GOOD, tmp_path / "file")


def test_a_declared_conflict_with_the_package_is_written_and_shown_from_both_sides(tmp_path):
    add_entry("Toy", {**GOOD, "model_ids": ["google/flan-t5-xxl"], "conflict_with": "flan-t5"}, tmp_path)
    assert [entry.id for entry in lookup("google/flan-t5-xxl", tmp_path).entries] == ["toy", "flan-t5"]


@given(st.text())
def test_a_toml_string_is_read_back(text):
    if text.isascii() or text.isprintable():
        assert parse(f"x = {toml_string(text)}", "x") == {"x": text}


@for_each("file", data_files(package_folder()), ids=lambda file: file.name)
def test_every_file_of_the_package_is_written_back_as_it_is(file):
    """The files are what `kb add` would have written, so that a contribution is a small diff."""
    data = parse(text_of(file), file.name)
    failures = ("\n".join(["[[failure]]", *_lines(table), ""]) for table in data.get("failure", ()))
    blocks = [*map(dump_entry, data.get("entry", ())), *failures]
    written = (f"family = {toml_string(data['family'])}\n\n" if "family" in data else "") + "\n".join(blocks)
    assert parse(written, file.name) == data


def test_names_of_files(tmp_path):
    assert slug("GPT-Neo / 2.7B") == "gpt-neo-2-7b"
    assert add_entry("../../Träume", GOOD, tmp_path).parent == tmp_path
    assert len(load(tmp_path).entries) == 168
