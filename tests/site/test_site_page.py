"""The page as a file: it escapes entries, loads nothing, is small, and the command writes it."""

import html
import json
import re
from dataclasses import replace

import pytest
import yaml

from halfstep.accounting import account, architectures, load_subject
from halfstep.errors import AccountError, ModelError
from halfstep.kb import KnowledgeBase, load
from halfstep.recipe import list_recipes
from halfstep.site import memory
from halfstep.site.page import TABS, space, to_html


HOSTILE = (
    '</script><script>alert(1)</script><img src=x onerror=alert(1)> & "q" \' | `c` [a](javascript:alert(1)) {{ 7 * 7 }}'
)


@pytest.fixture(scope="module")
def base():
    return load(None)


@pytest.fixture(scope="module")
def page(base):
    return to_html(base)


def hostile(base):
    entry = next(entry for entry in base.entries if entry.id == "flan-t5")
    report = next(report for report in base.failures if "flan-t5" in report.entries)
    bad = replace(entry, paraphrase=HOSTILE, notes=HOSTILE, aliases=(HOSTILE,), family=HOSTILE, risky={"fp16": HOSTILE})
    bad = replace(bad, references=(replace(bad.references[0], locator=HOSTILE),), keep_in_fp32=(HOSTILE,))
    bad = replace(bad, hardware=HOSTILE)
    return KnowledgeBase((bad,), (replace(report, symptom=HOSTILE, model=HOSTILE, tried=HOSTILE),))


def test_html_in_entries_is_escaped(base):
    page = to_html(hostile(base))
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "7 * 7" in page
    assert "javascript:alert" in page
    assert 'href="javascript' not in page
    data = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)[1]
    assert any(HOSTILE in text for text in json.loads(data)["kb"]["texts"])


def test_html_is_self_contained(page):
    assert not re.search(r"<(script|img|iframe|object|embed|audio|video|source)[^>]*\ssrc=", page)
    assert re.findall(r'<link [^>]*href="([^"]*)"', page) == ["data:,"]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", page)
    assert "default-src 'none'" in html.unescape(page)


def test_html_has_every_entry_reference_and_report(base, page):
    for entry in base.entries:
        assert f'id="{entry.id}"' in page
        assert all(f'href="{reference.url}"' in page for reference in entry.references)
    for report in base.failures:
        assert f'id="failure-{report.id}"' in page
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_page_is_small_and_states_its_data_version(page):
    assert len(page.encode()) < 500_000
    recipes, models = len(list_recipes()), len(architectures())
    assert re.search(
        rf"halfstep 0[.\d]+: \d+ formats, {models} architectures, {recipes} recipes; data [0-9a-f]{{12}}", page
    )
    assert page == to_html(load(None))


def test_page_without_javascript_shows_every_tab(page):
    panels = re.findall(r'<div role="tabpanel" id="panel-(\w+)"[^>]*>', page)
    assert panels == list(TABS)
    assert " hidden" not in "".join(re.findall(r'<div role="tabpanel"[^>]*>', page))


def test_every_recipe_and_architecture_has_a_row():
    kept = memory.kept()
    assert list(kept) == list(architectures())
    assert all(list(rows) == list_recipes() for rows in kept.values())


def test_reasons_of_missing_rows_equal_the_accounts_errors():
    names = [name for name, row in memory.kept()["galore-60m"].items() if isinstance(row, str)]
    assert sorted(names) == sorted(name for name in list_recipes() if name.startswith(("unit-", "umup-", "munit-")))
    for name in names:
        with pytest.raises(ModelError) as error:
            account(replace(load_subject("galore-60m"), batch=None), name)
        assert memory.kept()["galore-60m"][name] == str(error.value)


def test_missing_row_raises_with_the_command_to_measure_it(monkeypatch):
    kept = memory.kept()
    del kept["gpt2"]["fp32"]
    monkeypatch.setattr(memory, "kept", lambda: kept)
    with pytest.raises(AccountError, match=r"no row of gpt2 for fp32; `python docs/memory_tables.py`"):
        memory.table()


@pytest.mark.quick("adamw-8bit")
@pytest.mark.parametrize("recipe", ["fp32", "fp8-delayed", "adamw-8bit"])
def test_rows_equal_the_account(recipe):
    check_row(replace(load_subject("galore-60m"), batch=None), recipe)


@pytest.mark.slow
def test_rows_of_every_recipe_equal_the_account():
    for recipe, row in memory.kept()["galore-60m"].items():
        if not isinstance(row, str):
            check_row(load_subject("galore-60m"), recipe)
    for model in ("bert-base", "resnet-50", "gpt2"):
        for recipe in ("bf16-mixed", "fp8-delayed", "fp8lm-o2", "coat", "adamw-8bit"):
            check_row(load_subject(model), recipe)


def check_row(subject, recipe):
    """Compare the stored row with the account of the model with all of its blocks."""
    row = dict(zip(memory.COLUMNS, memory.kept()[subject.name][recipe], strict=True))
    made = account(subject, recipe)
    counts = {"parameters": made.parameters, "trained": made.trained}
    assert row == counts | {role: getattr(made.bytes, role) for role in memory.ROLES}, recipe


@pytest.mark.slow
def test_site_command_writes_the_page_and_a_space_once(tmp_path, run, page):
    file = tmp_path / "index.html"
    assert run("site", str(file), "--space", "--overlay", str(tmp_path))[0] == 0
    assert file.read_text(encoding="utf-8") == page
    front = next(yaml.safe_load_all((tmp_path / "README.md").read_text(encoding="utf-8")))
    assert (front["sdk"], front["app_file"], front["license"]) == ("static", "index.html", "apache-2.0")
    assert len(front["short_description"]) <= 60
    code, _, error = run("site", str(file), "--space")
    assert (code, "README.md' is there already" in error) == (2, True)
    code, _, error = run("site", str(tmp_path / "none" / "x.html"))
    assert (code, "name a file in a folder that exists" in error) == (2, True)


def test_title_with_quotes_is_valid_yaml():
    assert next(yaml.safe_load_all(space('a "b": c')))["title"] == 'a "b": c'
