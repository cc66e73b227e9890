"""Which entry answers a name: exact id, alias, glob, base model of a local folder, or none; user entries come first."""

import json

import pytest
from hypothesis import given, strategies as st
from toy_entry import ENTRY

from halfstep.errors import KnowledgeBaseError
from halfstep.kb import DEFAULT_OVERLAY, check, load, lookup, search
from halfstep.kb.reader import matches


def ids(answer):
    return [entry.id for entry in answer.entries]


def entry(name, *model_ids, aliases=(), more=""):
    text = ENTRY.replace('"toy"', f'"{name}"').replace('["toys/toy-1b"]', json.dumps(model_ids))
    return text.replace("paraphrase", f"aliases = {json.dumps(aliases)}\nreason = 'a test'\n{more}\nparaphrase")


def test_exact_id_precedes_alias_precedes_glob(overlay):
    levels = {
        "exact": entry("exact", "toys/a"),
        "alias": entry("alias", "toys/other", aliases=["toys/a", "toys/b"]),
        "glob": entry("glob", "toys/*"),
    }
    folder = overlay("".join(levels.values()))
    assert (lookup("toys/a", folder).how, ids(lookup("toys/a", folder))) == ("exact id", ["exact"])
    assert (lookup("toys/b", folder).how, ids(lookup("toys/b", folder))) == ("alias", ["alias"])
    assert (lookup("toys/c", folder).how, ids(lookup("toys/c", folder))) == ("glob", ["glob"])
    assert lookup("elsewhere/c", folder).how == "unknown"


def test_lookup_ignores_case():
    assert ids(lookup("GOOGLE/Flan-T5-XXL", overlay=None)) == ["flan-t5"]
    assert lookup("  google/flan-t5-xxl ", overlay=None).how == "exact id"


def test_glob_does_not_match_its_exceptions():
    assert ids(lookup("BAAI/bge-base-en", overlay=None)) == ["bge"]
    assert ids(lookup("BAAI/bge-reranker-v2-m3", overlay=None)) == ["bge-reranker-v2-m3"]


def test_glob_exception_without_an_entry_is_unknown(overlay):
    folder = overlay(entry("glob", "toys/*", more='except_ids = ["toys/Other"]'))
    assert lookup("toys/this", folder).how == "glob"
    assert lookup("toys/other", folder).how == "unknown"


@given(st.text("ab*/.+[", max_size=8), st.text("abAB/.+[", max_size=8))
def test_glob_does_not_match_slashes(pattern, name):
    """Against a recursive definition instead of a regular expression."""

    def covers(pattern, name):
        if not pattern:
            return not name
        if pattern[0] == "*":
            return covers(pattern[1:], name) or (bool(name) and name[0] != "/" and covers(pattern, name[1:]))
        return bool(name) and name[0] == pattern[0] and covers(pattern[1:], name[1:])

    assert matches(pattern, name) == covers(pattern.lower(), name.lower())


def test_similar_name_is_suggested_but_not_used():
    answer = lookup("somebody/flan-t5-xxl", overlay=None)
    assert not answer.known
    assert answer.near[0] == "google/flan-t5-xxl"


def test_model_without_an_entry_has_its_failure_reports():
    answer = lookup("google/gemma-4-2b", overlay=None)
    assert not answer.known
    assert len(answer.failures) == 2
    assert check("google/gemma-4-2b", "fp16", overlay=None).verdict == "risky"
    assert check("google/gemma-4-2b", "bf16", overlay=None).verdict == "unknown"


@pytest.mark.parametrize(
    ("written", "how", "entry"),
    [
        ("https://huggingface.co/google/flan-t5-xxl", "exact id", "flan-t5"),
        ("hf.co/google/flan-t5-xxl/tree/main", "exact id", "flan-t5"),
        ("google/flan-t5-xxl@0123abc", "exact id", "flan-t5"),
        ("llama2", "name", "llama-2"),
        ("Llama 2 7B", "name", "llama-2"),
        ("bloom-560m", "name", "bloom-small"),
        ("Llama 3 8B", "alias", "llama-3"),
        ("Meta-Llama-3.1-70B-Instruct", "name", "llama-3.1"),
        ("llama3.2-1b", "name", "llama-3.2"),
        ("mistralai/Mistral-7B-v0.1@main", "exact id", "mistral-7b"),
        ("Mistral 7B", "alias", "mistral-7b"),
        ("Qwen2.5-7B-Instruct", "name", "qwen2.5"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "base model", "qwen2.5"),
        ("qwen3-8b", "name", "qwen3"),
        ("gpt2", "alias", "gpt2"),
        ("gpt2-xl", "alias", "gpt2"),
        ("whisper-large-v3", "alias", "whisper-large-v3"),
        ("SD 1.5", "alias", "stable-diffusion-v1"),
        (
            "https://huggingface.co/stable-diffusion-v1-5/stable-diffusion-v1-5/tree/main",
            "exact id",
            "stable-diffusion-v1",
        ),
        ("TheBloke/Llama-2-7B-GPTQ", "base model", "llama-2"),
        ("somebody/flan-t5-xxl-AWQ-4bit-128g", "base model", "flan-t5"),
        ("google/flan-t5-xxl-bnb-4bit", "base model", "flan-t5"),
    ],
)
def test_names_in_common_spellings(written, how, entry):
    answer = lookup(written, overlay=None)
    assert (answer.how, ids(answer)) == (how, [entry])
    assert answer.model_id == written
    if how == "base model":
        assert answer.tier == "inferred"
        assert answer.bases


def test_name_with_many_suffixes_is_looked_up_fast():
    assert lookup("x-q4" + "_q4" * 29 + "-x", overlay=None).how == "unknown"
    for ending in ("Q4_K_M", ".q5_0", "_Q3_K_XL.gguf", "-q4_0_4_8", "-Q8_0_q4-awq"):
        assert ids(lookup(f"TheBloke/Llama-2-7B-{ending}", overlay=None)) == ["llama-2"], ending


@pytest.mark.parametrize(
    "written", ["Llama 7B 2", "llama", "Llama 2 8B", "somebody/flan-t5-xxl", "2-7b", "-GPTQ", "hf.co/"]
)
def test_other_names_are_unknown(written):
    assert not lookup(written, overlay=None).known


class TestLocalFolder:
    def write(self, folder, **files):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_json", ".json").replace("_md", ".md")).write_text(text, encoding="utf-8")
        return str(folder)

    @pytest.mark.parametrize(
        "card",
        [
            "---\nbase_model: google/flan-t5-xl\nlicense: mit\n---\n# x",
            '---\nlicense: mit\nbase_model: "google/flan-t5-xl"  # ours\n---\n',
            "---\nbase_model:\n- google/flan-t5-xl\nlicense: mit\n---\n",
            "---\r\nbase_model: [google/flan-t5-xl]\r\n---\r\n",
        ],
    )
    def test_base_model_of_the_card_answers_as_inferred(self, tmp_path, card):
        answer = lookup(self.write(tmp_path / "mine", README_md=card), overlay=None)
        assert (answer.how, ids(answer), answer.tier) == ("base model", ["flan-t5"], "inferred")
        assert answer.entries[0].tier == "definitive"

    @pytest.mark.parametrize(
        "files",
        [
            {"config_json": '{"_name_or_path": "google/flan-t5-xl"}'},
            {"adapter_config_json": '{"base_model_name_or_path": "google/flan-t5-xl"}'},
        ],
    )
    def test_base_model_of_the_configuration_answers(self, tmp_path, files):
        answer = lookup(self.write(tmp_path / "mine", **files), overlay=None)
        assert (answer.how, ids(answer)) == ("base model", ["flan-t5"])

    def test_quantized_base_model_resolves_to_its_original(self, tmp_path):
        config = '{"base_model_name_or_path": "unsloth/Llama-3.2-1B-Instruct-bnb-4bit"}'
        answer = lookup(self.write(tmp_path / "mine", adapter_config_json=config), overlay=None)
        assert (ids(answer), answer.tier) == (["llama-3.2"], "inferred")
        assert answer.bases == ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit",)
        assert "meta-llama/Llama-3.2-1B-Instruct" in answer.matched

    def test_hub_cache_folder_gives_the_id(self, tmp_path):
        folder = tmp_path / "models--google--flan-t5-xl" / "snapshots" / "0123"
        assert ids(lookup(self.write(folder, config_json="{}"), overlay=None)) == ["flan-t5"]

    def test_several_base_models_give_the_most_careful_verdict(self, tmp_path):
        card = "---\nbase_model:\n- EleutherAI/pythia-70m\n- google/flan-t5-xl\n---\n"
        verdict = check(self.write(tmp_path / "merge", README_md=card), "fp16", overlay=None)
        assert [reason.verdict for reason in verdict.reasons] == ["safe", "risky"]
        assert verdict.verdict == "risky"

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
    def test_stored_dtype_alone_gives_no_answer(self, tmp_path, key, dtype):
        folder = self.write(tmp_path / "mine", config_json=json.dumps({key: dtype}))
        answer = lookup(folder, overlay=None)
        assert (answer.how, answer.stored_dtype) == ("unknown", dtype)
        for use in ("fp16", "bf16"):
            assert check(folder, use, overlay=None).verdict == "unknown"

    def test_base_model_without_an_entry_is_named(self, tmp_path):
        folder = self.write(tmp_path / "mine", config_json='{"_name_or_path": "foo/bar"}')
        assert "foo/bar" in check(folder, "fp16", overlay=None).reasons[0].text

    def test_card_without_a_header_and_empty_folder_are_unknown(self, tmp_path):
        assert not lookup(self.write(tmp_path / "a", README_md="base_model: google/flan-t5-xl"), overlay=None).known
        assert not lookup(self.write(tmp_path / "b"), overlay=None).known

    @pytest.mark.parametrize(
        ("text", "message"), [("{", "is not JSON"), ("[1]", "holds a list"), ("[" * 100_000, "is not JSON")]
    )
    def test_broken_config_raises_with_its_name(self, tmp_path, text, message):
        folder = self.write(tmp_path / "mine", config_json=text)
        with pytest.raises(KnowledgeBaseError, match=message) as caught:
            lookup(folder, overlay=None)
        assert "config.json" in str(caught.value)

    def test_existing_folder_precedes_a_model_name(self, tmp_path, monkeypatch):
        """Like `from_pretrained`: a tiny model in a folder with a known name is not that model."""
        self.write(tmp_path / "google" / "flan-t5-xl", config_json='{"model_type": "llama"}')
        (tmp_path / "opt-175b").mkdir()
        monkeypatch.chdir(tmp_path)
        assert lookup("google/flan-t5-xl", overlay=None).how == "unknown"
        assert lookup("google/flan-t5-xxl", overlay=None).how == "exact id"
        assert lookup("opt-175b", overlay=None).how == "alias"  # an empty folder
        (tmp_path / "opt-175b" / "weights.npz").write_bytes(b"")
        assert lookup("opt-175b", overlay=None).how == "unknown"

    def test_card_with_too_many_base_models_raises(self, tmp_path):
        """Each is looked up in all entries, so a card of 1 MiB would take minutes."""
        folder = self.write(tmp_path, README_md="---\nbase_model:\n" + "- a/b\n- a/c\n" * 1000 + "---\n")
        assert lookup(folder, overlay=None).bases == ("a/b", "a/c")
        card = "---\nbase_model:\n" + "".join(f"- a/{i}\n" for i in range(1000)) + "---\n"
        with pytest.raises(
            KnowledgeBaseError, match="names 1000 base models, expected at most 100; shorten base_model"
        ):
            lookup(self.write(tmp_path, README_md=card), overlay=None)


@given(st.text(max_size=40))
def test_lookup_and_search_take_any_text(base, text):
    assert lookup(text, overlay=None).how in {"exact id", "alias", "glob", "name", "base model", "unknown"}
    assert len(search(base, text)) <= len(base.entries)


@pytest.mark.parametrize("name", ["", "\0", "~nobody-here/x", "x" * 5000, "../" * 50, "a/b/c"])
def test_odd_names_are_unknown(name):
    assert not lookup(name, overlay=None).known


class TestOverlay:
    def test_user_entry_precedes_the_packages(self, overlay):
        folder = overlay(entry("mine", "google/flan-t5-xxl"))
        answer = lookup("google/flan-t5-xxl", folder)
        assert ids(answer) == ["mine"]
        assert answer.entries[0].overlay
        assert ids(lookup("google/flan-t5-xl", folder)) == ["flan-t5"]

    def test_user_entry_of_the_same_id_replaces_the_packages(self, overlay):
        folder = overlay(entry("flan-t5", "toys/flan"))
        assert not lookup("google/flan-t5-xxl", folder).known

    def test_declared_conflict_shows_both_entries(self, overlay):
        folder = overlay(
            entry("mine", "google/flan-t5-xxl", more='conflict_with = "flan-t5"').replace("bf16_mixed", "fp32")
        )
        answer = lookup("google/flan-t5-xxl", folder)
        assert ids(answer) == ["mine", "flan-t5"]
        assert answer.conflict
        assert check("google/flan-t5-xxl", "bf16", folder).verdict == "risky"

    def test_user_failure_reports_count(self, overlay):
        report = (
            '[[failure]]\nid = "mine-1"\nkind = "failure"\nurl = "https://x.y/z"\nlocator = "x#1"\nmodel = "toy"\n'
            'model_ids = ["toys/*"]\ntrained_in = "bf16"\ntried = "fp16"\nuses = ["fp16"]\nsymptom = "NaN"\n'
        )
        folder = overlay(report, name="failures/mine.toml", family=None)
        assert check("toys/other", "fp16", folder).verdict == "risky"

    def test_broken_overlay_raises_with_the_file(self, overlay):
        with pytest.raises(KnowledgeBaseError, match=r"toy\.toml: entry 'toy'.*unknown word"):
            load(overlay(ENTRY.replace("bf16_mixed", "bf61")))
        with pytest.raises(KnowledgeBaseError, match=r"this is not TOML.*line 2"):
            load(overlay("=", name="toy.toml"))

    def test_non_utf8_file_raises(self, overlay):
        folder = overlay()
        (folder / "z.toml").write_bytes(b'family = "\xff"')
        with pytest.raises(KnowledgeBaseError, match="cannot be read as UTF-8"):
            load(folder)

    def test_missing_folder_raises_unless_it_is_the_default(self, tmp_path, monkeypatch):
        with pytest.raises(KnowledgeBaseError, match="no such folder; expected a folder of"):
            load(tmp_path / "nowhere")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert load(DEFAULT_OVERLAY) == load(None)


def test_search_needs_every_word_and_ranks_names_first(base):
    found = search(base, "FLAN t5")
    assert {entry.id for entry in found[:2]} == {"flan-t5", "blip2-flan-t5"}
    assert search(base, "flan nonsense") == ()
    assert search(base, "  ") == ()
    assert "codegeex" in {entry.id for entry in search(base, "ascend")}
