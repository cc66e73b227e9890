"""`halfstep claims`: the ledger, single rows and measuring again; every row's command parses."""

import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.main import get_command

import halfstep.claims
from halfstep.claims import load, run as running
from halfstep.claims.claim import describe, markdown
from halfstep.cli.app import app
from halfstep.recipe import get_recipe


def parse(command):
    """The options of a halfstep command, parsed without running it; an unknown subcommand or option raises."""
    name, *rest = shlex.split(command)
    current = get_command(app)
    context = current.make_context(name, rest)
    while hasattr(current, "resolve_command") and (context._protected_args + context.args):
        name, current, rest = current.resolve_command(context, context._protected_args + context.args)
        context = current.make_context(name, rest, parent=context)
    return context.params


LONG = [claim for claim in load() if claim.command and not claim.check]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("claim", [c for c in LONG if c.command.startswith("python ")], ids=lambda claim: claim.id)
def test_scripts_of_rows_exist_and_know_their_options(claim):
    _, file, *given = shlex.split(claim.command)
    source = (ROOT / file).read_text()
    beside = [
        (ROOT / file).parent / f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
    ]
    source += "".join(each.read_text() for each in beside if each.exists())
    assert [word for word in given if not word.isdecimal() and f'"{word}"' not in source] == []


@pytest.mark.parametrize("claim", [c for c in LONG if c.command.startswith("halfstep ")], ids=lambda claim: claim.id)
def test_commands_of_rows_parse(claim):
    options = parse(claim.command)
    assert [get_recipe(name).name for name in options["recipes"].split(",")]


@pytest.mark.parametrize("command", ["halfstep compar", "halfstep compare --recipe fp32", "halfstep compare extra"])
def test_unknown_command_fails_to_parse(command):
    with pytest.raises(Exception, match=r"(?i)no such|unexpected extra"):
        parse(command)


def test_table_has_every_claim(run):
    code, out, err = run("claims")
    assert (code, err) == (0, "")
    for claim in load():
        line = next(line for line in out.splitlines() if line.split()[:1] == [claim.id])
        assert line.endswith(claim.claim)
        assert f" {claim.verdict} " in line
        assert line == line.rstrip()


@pytest.mark.parametrize("columns", [24, 60, 200])
def test_terminal_output_folds_claims_under_subjects(run, monkeypatch, columns):
    monkeypatch.setattr("halfstep.cli.claims._in_terminal", lambda: True)
    code, out, err = run("claims", columns=columns)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("  ") and len(line) >= columns and " " in line.strip()] == []
    text = " ".join(out.split())
    for claim in load():
        assert f"{claim.id}: {claim.verdict}" in lines
        assert f"{claim.id}: {claim.verdict} {claim.claim}" in text
        assert text.index(claim.subject) < text.index(f"{claim.id}: ")


def test_json_holds_the_whole_ledger(run):
    code, out, _ = run("claims", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["id"] for row in rows] == [claim.id for claim in load()]
    assert [(row["figure"], row["short"]) for row in rows] == [(claim.figure, claim.short) for claim in load()]
    assert rows[0]["numbers"]["fp16_first"] == {"value": 2048, "tolerance": 0.0, "kept": []}
    assert json.loads(run("claims", "show", rows[0]["id"], "--json")[1]) == rows[0]


def test_show_and_markdown_output(run):
    assert run("claims", "show", "forum-zeroed")[:2] == (0, describe(load_one("forum-zeroed")) + "\n")
    assert run("claims", "--markdown")[:2] == (0, markdown(load()))


@pytest.mark.parametrize("width", [50, 105])
def test_claim_folds_to_the_given_width(width):
    lines = describe(load_one("forum-zeroed"), width).splitlines()
    assert max(map(len, lines)) <= max(width, 15 + max(len(word) for line in lines for word in line.split()))
    assert width == 105 or len(lines) > len(describe(load_one("forum-zeroed")).splitlines())


def test_run_prints_measured_and_recorded_numbers(run):
    code, out, _ = run("claims", "--run", "autocast-cpu")
    assert code == 0
    assert out.startswith("$ python -m halfstep.claims.checks autocast-cpu\n")
    assert ["operations", "24", "24", "0", "yes"] in [line.split() for line in out.splitlines()]
    assert f"recorded: {load_one('autocast-cpu').figure}\nverdict: in part\n" in out


def test_unconfirmed_number_exits_1(run, monkeypatch):
    measured = {name: number.value for name, number in load_one("autocast-cpu").numbers.items()}
    wrong = {**measured, "float32": 6, "new": 1}
    monkeypatch.setattr(running, "run", lambda claim: running.Outcome(claim, wrong))
    code, out, _ = run("claims", "--run", "autocast-cpu")
    assert code == 1
    assert ["float32", "6", "5", "0", "NO"] in [line.split() for line in out.splitlines()]
    assert ["new", "1", "-", "-", "NO"] in [line.split() for line in out.splitlines()]


def recorded(claim, results, off=()):
    """The recorded outcome of a claim, or a wrong one for claims in `off`."""
    numbers = {name: number.value + (claim.id in off) * 1e9 for name, number in claim.numbers.items()}
    return running.Outcome(claim, numbers)


def test_check_compares_every_measured_claim(run, monkeypatch):
    chosen = [claim for claim in load() if claim.short or claim.files]
    assert len(chosen) == len([claim for claim in load() if claim.verdict != "open"])
    monkeypatch.setattr(running, "run", recorded)
    code, out, err = run("claims", "--check", "--results", str(ROOT / "benchmarks" / "results"))
    assert (code, err) == (0, "")
    assert out.endswith(f"{len(chosen)} of {len(chosen)} claims confirmed\n")
    monkeypatch.setattr(running, "run", partial(recorded, off=["forum-bytes", "forum-loss"]))
    code, out, err = run("claims", "--check", "--results", str(ROOT / "benchmarks" / "results"))
    assert code == 1
    assert "NO   forum-bytes\n" in out
    assert f"{len(chosen) - 2} of {len(chosen)} claims confirmed" in out
    assert "forum-bytes: bf16_master: measured 1000000016.0, recorded 16 ± 0; `halfstep claims --run forum-b" in err
    assert "forum-loss: master: measured 999999999.999904, recorded -9.6e-05 ± 5e-05; rewrite the row" in err


def test_check_outside_a_clone_reports_skipped_claims(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "run", recorded)
    short = [claim for claim in load() if claim.short]
    kept = [claim for claim in load() if claim.files]
    code, out, err = run("claims", "--check")
    assert code == 0
    assert out.endswith(f"{len(short)} of {len(short)} claims confirmed\n")
    assert f"{len(kept)} more have figures of benchmarks, which were not compared: benchmarks/results is not" in err


def test_check_without_result_files_exits_1(run, monkeypatch, tmp_path):
    monkeypatch.setattr("halfstep.claims.load", lambda: [load_one("forum-loss")])
    code, out, err = run("claims", "--check", "--results", str(tmp_path / "nothing"))
    assert (code, out) == (1, "NO   forum-loss\n0 of 1 claims confirmed\n")
    assert "which_bf16.json cannot be read (No such file or directory)" in err


def test_running_a_benchmark_outside_a_clone_exits_2(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("claims", "--run", "forum-loss")
    assert code == 2
    assert "benchmarks/which_bf16.py is not here; benchmarks are run in a clone of halfstep" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "forum-byte"], "unknown claim 'forum-byte'; nearest: forum-bytes"),
        (["show", "forum-byte"], "unknown claim 'forum-byte'; nearest: forum-bytes"),
        (["--check", "--json"], "give one of them"),
        (["--results", "x"], "found --results without --check"),
        (["--json", "show", "forum-bytes"], "give one of them"),
    ],
)
def test_bad_arguments_exit_2(run, arguments, words):
    code, out, err = run("claims", *arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_running_an_open_claim_exits_2(run, monkeypatch):
    found = replace(load_one("forum-bytes"), verdict="open", command="", note="Not measured on a GPU.")
    monkeypatch.setattr(halfstep.claims, "get_claim", lambda id: found)
    code, _, err = run("claims", "--run", "forum-bytes")
    assert code == 2
    assert "'forum-bytes' is open and has no command yet. Not measured on a GPU." in err


def load_one(id):
    return next(claim for claim in load() if claim.id == id)
