"""Adding an entry: it reads back as given, and no invalid entry is written."""

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


def test_added_entry_is_read_back(tmp_path):
    file = add_entry("Toy Story", GOOD, tmp_path)
    assert file.name == "toy-story.toml"
    (entry,) = lookup("toys/toy-1b", tmp_path).entries
    assert (entry.family, entry.paraphrase, entry.overlay) == ("Toy Story", GOOD["paraphrase"], True)
    assert entry.references[0].locator == "section 3"


def test_second_entry_is_appended(tmp_path):
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
def test_invalid_entry_is_not_written(tmp_path, change, message):
    with pytest.raises(KnowledgeBaseError, match=message):
        add_entry("Toy", {**GOOD, **change}, tmp_path)
    assert data_files(tmp_path) == []


def test_rejected_entry_leaves_the_file_unchanged(tmp_path):
    before = text_of(add_entry("Toy", GOOD, tmp_path))
    with pytest.raises(KnowledgeBaseError, match="One entry per model"):
        add_entry("Toy", {**GOOD, "id": "toy-2", "train_precision": "fp32"}, tmp_path)
    assert text_of(tmp_path / "toy.toml") == before


def test_unwritable_folder_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KnowledgeBaseError, match=r"cannot write .*toy\.toml.*--folder"):
        add_entry("Toy", GOOD, tmp_path / "file")


def test_declared_conflict_with_the_package_shows_both_entries(tmp_path):
    add_entry("Toy", {**GOOD, "model_ids": ["google/flan-t5-xxl"], "conflict_with": "flan-t5"}, tmp_path)
    assert [entry.id for entry in lookup("google/flan-t5-xxl", tmp_path).entries] == ["toy", "flan-t5"]


@given(st.text())
def test_toml_string_is_read_back(text):
    if text.isascii() or text.isprintable():
        assert parse(f"x = {toml_string(text)}", "x") == {"x": text}


@for_each("file", data_files(package_folder()), ids=lambda file: file.name)
def test_package_files_roundtrip(file):
    """Package files have the layout that `kb add` writes, so that contributions are small diffs."""
    data = parse(text_of(file), file.name)
    failures = ("\n".join(["[[failure]]", *_lines(table), ""]) for table in data.get("failure", ()))
    blocks = [*map(dump_entry, data.get("entry", ())), *failures]
    written = (f"family = {toml_string(data['family'])}\n\n" if "family" in data else "") + "\n".join(blocks)
    assert parse(written, file.name) == data


def test_file_names_of_families(tmp_path):
    assert slug("GPT-Neo / 2.7B") == "gpt-neo-2-7b"
    assert add_entry("../../Träume", GOOD, tmp_path).parent == tmp_path
    assert len(load(tmp_path).entries) == 168
