"""The package's entries, and the forum wiki's list that the knowledge base must answer."""

import re

import pytest

from families import for_each
from halfstep.kb import check, load, lookup
from halfstep.kb.add import validate
from halfstep.kb.reader import package_folder, schema, uses, words
from halfstep.kb.verdict import casts, judge


ENTRIES = load(None).entries
every_entry = for_each("entry", ENTRIES, ids=lambda entry: entry.id)

# The models of the forum wiki with the wiki's precisions. PEGASUS is the declared conflict.
WIKI = {
    "allenai/longformer": "fp16_mixed",
    "allenai/longformer-base-4096": "fp16_mixed",
    "allenai/led": "fp16_mixed",
    "lvwerra/codeparrot": "fp16_mixed",
    "facebook/m2m100_418M": "fp16_mixed",
    "facebook/m2m100_1.2B": "fp16_mixed",
    "eleutherai/gpt-neox-20b": "fp16_mixed",
    "google/mobilebert": "bf16_mixed",
    "eleutherai/gpt-neo-1.3b": "bf16_mixed",
    "eleutherai/gpt-j-6b": "bf16_mixed",
    "google/mt5": "bf16_mixed",
    "t5": "bf16_mixed",
    "bigscience/T0": "bf16_mixed",
    "bigscience/T0pp": "bf16_mixed",
    "bigscience/T0_anything": "bf16_mixed",
    "EleutherAI/gpt-neo-2.7B": "fp32",
    "gsarti/it5-base": "fp32",
    "gsarti/it5-anything": "fp32",
}


def test_package_has_all_entries_and_reports(base):
    assert len(base.entries) == 167
    assert base.counts() == {"definitive": 102, "inferred": 65}
    assert len({entry.family for entry in base.entries}) == 147
    assert len(base.failures) == 68


@every_entry
def test_no_reference_links_to_a_branch(entry):
    moving = [one.url for one in entry.references if re.search(r"/(blob|tree|raw)/(main|master)/", one.url)]
    assert not moving, moving


def test_package_data_is_valid():
    assert validate(package_folder()) == []


@for_each("name, precision", WIKI.items())
def test_forum_wiki_models_are_answered(name, precision):
    answer = lookup(name, overlay=None)
    assert [entry.train_precision for entry in answer.entries] == [precision]


@pytest.mark.parametrize("name", ["google/pegasus-cnn_dailymail", "google/pegasus-xsum"])
def test_unreferenced_wiki_line_is_a_declared_conflict(name):
    answer = lookup(name, overlay=None)
    assert answer.conflict
    assert answer.tier == "inferred"
    assert {entry.train_precision for entry in answer.entries} == {"fp32", "bf16_mixed"}


@every_entry
def test_every_id_finds_its_entry(base, entry):
    for name in (*entry.model_ids, *entry.aliases, entry.id):
        assert entry in lookup(name, overlay=None).entries


@every_entry
def test_every_entry_cites_a_valid_link(entry):
    assert entry.references
    for reference in entry.references:
        assert re.fullmatch(r"https://[a-z0-9.-]+/\S+", reference.url)
        if reference.url.startswith("https://github.com/") and reference.commit:
            assert reference.commit in reference.url


@every_entry
def test_definitive_entries_have_primary_evidence(entry):
    if entry.tier == "definitive":
        assert entry.evidence_kind not in {"secondary", "inferred_hardware", "wiki_unreferenced"}


@every_entry
def test_every_entry_has_reasoned_verdicts_for_every_use(base, entry):
    for use in uses():
        verdict = judge(base, entry.id, use)
        assert verdict.verdict in {"safe", "risky", "unknown"}
        assert all(reason.text for reason in verdict.reasons)
        assert verdict.references


@every_entry
def test_fp32_is_safe_for_every_model(base, entry):
    assert judge(base, entry.id, "fp32").safe


@every_entry
def test_bf16_trained_models_are_risky_in_fp16_by_default(base, entry):
    if entry.compute == "bf16" and "fp16" not in entry.safe:
        assert judge(base, entry.id, "fp16").verdict == "risky"


@every_entry
def test_models_are_safe_in_their_training_dtype_by_default(base, entry):
    if entry.compute in uses() and entry.compute not in entry.risky and not entry.conflict_with:
        found = judge(base, entry.id, entry.compute)
        failed = any(report.kind == "failure" and entry.compute in report.uses for report in found.answer.failures)
        assert found.verdict == ("unknown" if failed else "safe")


def test_stored_dtype_changes_no_verdict():
    llama = lookup("meta-llama/Llama-2-7b-hf", overlay=None).entries[0]
    assert llama.released_dtype.startswith("float16")
    assert llama.train_precision == "bf16_mixed"
    assert check("meta-llama/Llama-2-7b-hf", use="fp16", overlay=None).verdict == "risky"


WIDELY_USED = {
    "openai-community/gpt2": ("fp32", "inferred"),
    "mistralai/Mistral-7B-v0.1": ("unknown", "inferred"),
    "meta-llama/Meta-Llama-3-8B": ("bf16_mixed", "definitive"),
    "meta-llama/Llama-3.1-405B": ("bf16_mixed", "definitive"),
    "meta-llama/Llama-3.2-1B": ("bf16_mixed", "inferred"),
    "Qwen/Qwen2.5-7B": ("bf16_mixed", "inferred"),
    "Qwen/Qwen3-8B": ("unknown", "inferred"),
    "openai/whisper-large-v3": ("fp16_mixed", "inferred"),
    "stable-diffusion-v1-5/stable-diffusion-v1-5": ("unknown", "inferred"),
}


@pytest.mark.parametrize("name", WIDELY_USED)
def test_widely_used_models_have_entries(name):
    """A released dtype is no evidence: if nothing else is known, the precision is unknown."""
    answer = lookup(name, overlay=None)
    (entry,) = answer.entries
    assert (entry.train_precision, answer.tier) == WIDELY_USED[name]
    if entry.train_precision == "unknown":
        assert check(name, use="fp16", overlay=None).verdict == "unknown"


def test_hub_ids_are_unconfirmed_until_a_reference_names_them():
    assert lookup("google/flan-t5-xxl", overlay=None).id_confirmed
    assert not lookup("google/flan-t5-small", overlay=None).id_confirmed
    confirmed = [name for entry in ENTRIES for name in entry.id_confirmed]
    ids = [name for entry in ENTRIES for name in entry.model_ids]
    assert 0 < len(confirmed) < len(ids) / 5


@pytest.mark.parametrize("name", ["facebook/nllb-200-3.3B", "facebook/xglm-7.5B"])
def test_uncited_models_have_no_entry(name):
    assert not lookup(name, overlay=None).known


@pytest.mark.parametrize(
    "name", ["google/ul2", "facebook/bart-large", "mistralai/Mixtral-8x7B-v0.1", "microsoft/phi-4"]
)
def test_unstated_precisions_are_recorded_as_unknown(name):
    (entry,) = lookup(name, overlay=None).entries
    assert (entry.train_precision, entry.tier) == ("unknown", "inferred")
    assert entry.paraphrase.startswith("Looked for, not stated")


def test_reports_link_to_existing_entries_and_name_their_model(base):
    ids = {entry.id for entry in base.entries}
    linked = [report for report in base.failures if report.entries]
    assert all(set(report.entries) <= ids for report in linked)
    assert len(linked) >= 40
    assert all(report.model for report in base.failures)


def test_cast_table_covers_all_training_dtypes_and_uses():
    natives = {word.split("_")[0] for word in schema()["$defs"]["precision"]["enum"]}
    assert set(casts()) == {(native, use) for native in natives for use in uses()}


def test_precisions_of_parts_equal_those_of_models():
    assert set(words("train_precision")) - {"mixed_by_part"} == set(schema()["$defs"]["precision"]["enum"])
