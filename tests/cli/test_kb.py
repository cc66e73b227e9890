"""`halfstep kb`: output, exit codes, and imports."""

import csv
import io
import json
import re
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from halfstep.cli.app import COMMANDS, app, main


REFERENCE = "config https://github.com/toys/toy/blob/0123abc/train.yaml precision: bf16"
ADD = ["add", "--model-id", "toys/toy-1b", "--family", "Toy", "--year", "2024", "--precision", "bf16_mixed"]
ADD += ["--evidence", "config", "--says", "The config says bf16."]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    """An empty home folder, so that the user's own entries do not count."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def kb(monkeypatch, capsys):
    """A function that runs `halfstep kb ...` as the console script does and returns exit code, output and errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["halfstep", "kb", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        shown = capsys.readouterr()
        return int(stop.value.code or 0), shown.out, shown.err

    return run


@pytest.mark.quick(
    "google/flan-t5-xxl-fp16-1-risky: google/flan-t5-xxl in fp16",
    "google/flan-t5-xxl-float16-1-risky: google/flan-t5-xxl in fp16",
    "foo/bar-fp16-3-unknown: foo/bar in fp16",
    "google/flan-t5-small-bf16-0-hub id unconfirmed",
    "google/pegasus-xsum-fp16-1-the entries conflict",
)
@pytest.mark.parametrize(
    ("model", "use", "code", "says"),
    [
        ("google/flan-t5-xxl", "fp16", 1, "risky: google/flan-t5-xxl in fp16"),
        ("google/flan-t5-xxl", "bf16", 0, "safe: google/flan-t5-xxl in bf16"),
        ("google/flan-t5-xxl", "float16", 1, "risky: google/flan-t5-xxl in fp16"),
        ("meta-llama/Llama-2-7b-hf", "fp16", 1, "trained in bf16_mixed"),
        ("Salesforce/blip2-flan-t5-xl", "fp16", 1, "vision_model: safe, trained in fp16_pure"),
        ("Salesforce/blip2-flan-t5-xl", "fp16", 1, "language_model: risky, trained in bf16_mixed"),
        ("foo/bar", "fp16", 3, "unknown: foo/bar in fp16"),
        ("foo/bar", "fp16", 3, "record the largest activation"),
        ("google/flan-t5-small", "bf16", 0, "hub id unconfirmed"),
        ("google/pegasus-xsum", "fp16", 1, "the entries conflict"),
    ],
)
def test_check_verdicts_and_exit_codes(kb, model, use, code, says):
    found, out, err = kb("check", model, "--use", use)
    assert (found, err) == (code, "")
    assert says in out


def test_check_gives_references_and_reports(kb):
    _, out, _ = kb("check", "google/flan-t5-xxl", "--use", "fp16")
    assert "https://huggingface.co/google/flan-t5-xxl/discussions/5/files" in out
    assert "https://github.com/declare-lab/flan-alpaca/issues/19" in out
    assert "keep in fp32: the feed-forward output projection (wo)" in out


@pytest.mark.parametrize(("use", "code"), [("fp16", 1), ("bf16", 0)])
def test_check_as_json_has_the_same_exit_code(kb, use, code):
    found, out, _ = kb("check", "google/flan-t5-xxl", "--use", use, "--json")
    data = json.loads(out)
    assert found == code
    assert data["verdict"] == {0: "safe", 1: "risky"}[code]
    assert data["answer"]["entries"][0]["references"][0]["url"].startswith("https://")
    assert (data["failures"] == []) == (code == 0)


def test_check_of_local_folder(kb, tmp_path):
    (tmp_path / "README.md").write_text("---\nbase_model: google/flan-t5-xl\n---\n")
    (tmp_path / "config.json").write_text('{"torch_dtype": "float16"}')
    code, out, _ = kb("check", tmp_path, "--use", "fp16")
    assert code == 1
    assert "entry flan-t5, inferred, found by base model google/flan-t5-xl" in out
    assert "stored as float16" in out


def test_unknown_use_suggests_the_nearest(kb):
    code, out, err = kb("check", "google/flan-t5-xxl", "--use", "bf61")
    assert (code, out) == (2, "")
    assert "unknown type to run a model in 'bf61'; nearest: bf16" in err


def test_unknown_model_suggests_existing_commands(kb):
    _, out, _ = kb("show", "nowhere/unheard-of")
    assert [step for step in re.findall(r"^next: halfstep (\w+)", out, re.MULTILINE) if step in COMMANDS] == [
        "inspect",
        "probe",
    ]


@pytest.mark.quick("words3", "words4")
@pytest.mark.parametrize(
    "words", [[], ["check"], ["check", "a"], ["check", "a", "--use"], ["export"], ["export", "--format", "pdf"]]
)
def test_wrong_arguments_exit_2(words):
    found = CliRunner().invoke(app, ["kb", *words])
    assert found.exit_code == 2
    assert "Traceback" not in found.output


def test_show(kb):
    code, out, _ = kb("show", "google/pegasus-xsum")
    assert code == 0
    assert "pegasus-large" in out
    assert "pegasus-wiki" in out
    code, out, _ = kb("show", "me/flan-t5-xxl")
    assert code == 1
    assert "nearest names: google/flan-t5-xxl" in out
    code, out, _ = kb("show", "t5", "--json")
    assert json.loads(out)["entries"][0]["id"] == "t5-v1"


def test_search(kb):
    code, out, _ = kb("search", "blip2", "flan")
    assert code == 0
    assert "blip2-flan-t5" in out
    assert "1 definitive entries; apart from them, 0 inferred" in out
    code, out, err = kb("search", "no", "such", "model")
    assert (code, out) == (1, "")
    assert "no entry has every word of 'no such model'" in err


def test_list_filters(kb):
    code, out, _ = kb("list", "--json")
    everything = json.loads(out)
    assert (code, len(everything)) == (0, 167)
    _, out, _ = kb("list", "--precision", "bf16", "--tier", "definitive", "--since", "2024", "--json")
    chosen = json.loads(out)
    assert 0 < len(chosen) < len(everything)
    assert all(
        "bf16" in entry["train_precision"] and entry["tier"] == "definitive" and entry["year"] >= 2024
        for entry in chosen
    )
    _, out, _ = kb("list", "--precision", "fp16_pure", "--json")
    assert [entry["id"] for entry in json.loads(out)] == ["blip2-flan-t5"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--precision", "bf61"], 2, "unknown precision 'bf61'; nearest: bf16"),
        (["--tier", "sure"], 2, "unknown tier 'sure'. Known: definitive, inferred"),
        (["--since", "2030"], 1, "no entry has --since 2030"),
        (["--precision", "tf32"], 1, "no entry has --precision tf32"),
    ],
)
def test_empty_list_gives_a_message(kb, words, code, message):
    found, out, err = kb("list", *words)
    assert (found, out) == (code, "")
    assert message in " ".join(err.split())


def test_empty_list_as_json(kb):
    code, out, _ = kb("list", "--since", "2030", "--json")
    assert (code, json.loads(out)) == (1, [])


def test_model_card(kb):
    code, out, _ = kb("model-card", "Salesforce/blip2-flan-t5-xl")
    assert code == 0
    assert yaml.safe_load(out)["trained_precision"] == {"vision_model": "fp16_pure", "language_model": "bf16_mixed"}
    code, out, err = kb("model-card", "google/pegasus-xsum")
    assert (code, out) == (2, "")
    assert "conflict" in err


def test_validate(kb, tmp_path):
    code, out, _ = kb("validate")
    assert code == 0
    assert "102 definitive entries; apart from them, 65 inferred; 68 failure reports: no problem found" in out
    (tmp_path / "x.toml").write_text("family = [")
    code, _, err = kb("validate", tmp_path)
    assert code == 1
    assert "x.toml: this is not TOML" in err
    code, _, err = kb("validate", tmp_path / "nowhere")
    assert code == 2
    assert "holds no .toml file" in err


def test_add_without_a_reference_exits_2(kb, tmp_path):
    code, _, err = kb(*ADD, "--folder", tmp_path / "own")
    assert code == 2
    assert "an entry needs --reference. Every entry cites what it rests on" in err
    assert not (tmp_path / "own").exists()


def test_added_entry_is_found_by_later_commands(kb, tmp_path):
    code, out, _ = kb(*ADD, "--reference", REFERENCE)
    assert code == 0
    assert "src/halfstep/kb/data" in out
    assert (tmp_path / "home/.config/halfstep/kb/toy.toml").exists()
    code, out, _ = kb("check", "toys/toy-1b", "--use", "bf16")
    assert code == 0
    assert "https://github.com/toys/toy/blob/0123abc/train.yaml" in out
    code, out, _ = kb("show", "toys/toy-1b", "--json")
    assert json.loads(out)["entries"][0]["references"][0]["commit"] == "0123abc"
    assert kb("validate", tmp_path / "home/.config/halfstep/kb")[0] == 0


def test_add_with_parts_into_a_folder(kb, tmp_path):
    words = [*ADD[:7], *ADD[9:], "--part", "vision=fp16_mixed", "--part", "text=bf16_mixed", "--reference", REFERENCE]
    assert kb(*words, "--folder", tmp_path / "own")[0] == 0
    code, out, _ = kb("check", "toys/toy-1b", "--use", "fp16", "--overlay", tmp_path / "own")
    assert code == 1
    assert "text: risky, trained in bf16_mixed" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reference", "paper https://x.y/z"], "expected three things, KIND URL WHERE"),
        (["--reference", "rumour https://x.y/z here"], "unknown word for entry.references[0].kind 'rumour'"),
        (["--reference", REFERENCE, "--part", "vision"], "expected NAME=PRECISION"),
        (["--reference", REFERENCE, "--tier", "sure"], "unknown word for entry.tier 'sure'"),
        (["--reference", REFERENCE, "--model-id", "google/flan-t5-xxl"], "One entry per model"),
    ],
)
def test_add_with_bad_arguments_exits_2(kb, tmp_path, words, message):
    code, _, err = kb(*ADD, *words, "--folder", tmp_path / "own")
    assert code == 2
    assert message in err


def test_add_prompts_in_a_terminal(kb, monkeypatch):
    answers = iter(["toys/toy-1b", "Toy", 2024, "bf16_mixed", "config", "The config says bf16.", REFERENCE])
    monkeypatch.setattr("halfstep.cli.kb.typer.prompt", lambda question, type: next(answers))
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert kb("add")[0] == 0
    assert kb("show", "toys/toy-1b")[0] == 0


def test_control_characters_in_entries_are_escaped(kb, tmp_path):
    kb(*ADD, "--reference", REFERENCE, "--folder", tmp_path / "own")
    file = tmp_path / "own/toy.toml"
    text = file.read_text()
    file.write_text(text.replace("The config says bf16.", "\\u001b[2Jgone [red]x[/red]"))
    code, out, err = kb("show", "toys/toy-1b", "--overlay", tmp_path / "own")
    assert code == 2
    assert "\x1b[2J" not in out + err
    assert "\\x1b[2Jgone [red]x[/red]" in err
    file.write_text(text.replace("The config says bf16.", "[red]x[/red] [/]"))
    code, out, _ = kb("search", "toy-1b", "--overlay", tmp_path / "own")
    assert code == 0
    assert "[red]x[/red] [/]" in kb("show", "toys/toy-1b", "--overlay", tmp_path / "own")[1]
    _, out, err = kb("check", "\x1b[31mred", "--use", "fp16")
    assert "\x1b[31m" not in out + err


def test_export_to_standard_output_and_to_a_file(kb, tmp_path):
    _, out, _ = kb("export", "--format", "json")
    assert len(json.loads(out)["entries"]) == 167
    _, out, _ = kb("export", "--format", "csv")
    assert len(list(csv.DictReader(io.StringIO(out)))) == 167
    _, out, _ = kb("export", "--format", "md")
    assert out.startswith("# In which precision")
    code, out, _ = kb("export", "--format", "csv", "-o", tmp_path / "kb.csv")
    assert code == 0
    assert "wrote" in out
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "kb.csv").read_text(encoding="utf-8"))))) == 167
    code, _, err = kb("export", "--format", "csv", "-o", tmp_path / "no/such/kb.csv")
    assert code == 2
    assert "name a file in a folder that exists" in err


ANSWERS = ["check google/flan-t5-xxl --use fp16", "show t5", "search flan", "list", "model-card t5"]


def test_commands_import_neither_torch_nor_numpy():
    """One process answers all commands and prints the imported modules after each."""
    script = (
        "import sys\n"
        "from halfstep.cli.app import main\n"
        "for words in sys.argv[1:]:\n"
        "    sys.argv = ['halfstep', 'kb', *words.split()]\n"
        "    try: main()\n"
        "    except SystemExit as stopped: assert stopped.code in (None, 0, 1), (words, stopped.code)\n"
        "    found = {'torch', 'numpy', 'jinja2', 'jsonschema'} & set(sys.modules)\n"
        "    assert not found, (words, found)\n"
        "    print('answered', words)"
    )
    found = subprocess.run([sys.executable, "-c", script, *ANSWERS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    parts = re.split(r"^answered .*$", found.stdout, flags=re.MULTILINE)
    assert len(parts) == len(ANSWERS) + 1
    assert all(part.strip() for part in parts[:-1])


def test_python_functions_import_neither_torch_nor_numpy():
    script = (
        "import sys, halfstep\n"
        "assert halfstep.kb.check('google/flan-t5-xxl', use='bf16', overlay=None)\n"
        "assert halfstep.kb.lookup('t5', overlay=None).known\n"
        "assert not {'torch', 'numpy', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow  # cli/test_without_extras.py tests this for every command
def test_site_without_jinja2_names_the_extra():
    script = (
        "import sys; sys.modules['jinja2'] = None\n"
        "sys.argv = ['halfstep', 'site', 'page.html']\n"
        "from halfstep.cli.app import main; main()"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 2
    assert "pip install 'halfstep[lab]'" in found.stderr
