"""The report: complete for every kind of run folder, correct statements, and escaped text."""

import base64
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folder import USUAL, Run, changed, edited, usual_experiment, write

from families import slow_unless
from halfstep.errors import RunError
from halfstep.lab import report as pages
from halfstep.lab.experiment import Experiment
from halfstep.lab.report import curves, exponents, write_report
from halfstep.lab.report.results import load
from halfstep.lab.verdict import rule


PLOTS = {"metric", "loss", "gap", "speed", "memory", "loss-scale", "gradient-exponents", "zeroed", "descent"}
VOID = {"meta", "img", "link", "br", "hr", "input"}


class Page(HTMLParser):
    """The page's elements with their attributes, and its text; checks that tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], ""
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if not self.open or self.open[-1] != "style" else ""

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def report(folder):
    path = write_report(folder)
    assert path == folder.path / "report.html"
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("runs") / "usual")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfstep.lab.report.results._DPI", 50)  # rendering takes most of the time
        return folder, report(folder)


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr("halfstep.lab.report.results._DPI", 50)


def test_page_states_every_verdict_and_the_rule(usual):
    folder, page = usual
    for words in (*USUAL, "the baseline", "matches", "degrades", "diverged at step 2", "(gradient)", rule()):
        assert words in page.text
    assert "4 of 6 recipes match fp32; bf16-nomaster degrades by 3.1%; fp16-pure diverged at step 2." in page.text
    assert f"--out {folder.path} --resume" in page.text
    assert "Some Processor" in page.text
    assert re.search(r"fp16-pure \d\.\d+ before it diverged", page.text)
    assert "left out: the task's own" in page.text


def test_summary_holds_the_verdicts(usual):
    folder, _ = usual
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary == load(folder).summary()
    assert set(summary) == {"experiment", "rule", "margin", "metric", "band", "verdicts"}
    assert (summary["experiment"], summary["rule"], summary["band"]["seeds"]) == ("usual", rule(), 3)
    found = {v["recipe"]: v["status"] for v in summary["verdicts"]}
    assert list(found) == list(USUAL)
    assert found["bf16-nomaster"] == "degrades"
    assert found["fp16-pure"] == "diverged"
    assert {found[r] for r in USUAL if r not in ("bf16-nomaster", "fp16-pure")} == {"matches"}


def test_page_is_self_contained(usual):
    """Offline, without scripts or requests: every reference is to data or an anchor in the page."""
    folder, page = usual
    text = (folder.path / "report.html").read_text(encoding="utf-8")
    assert not page.all("script")
    assert not page.all("link")
    assert not re.search(r"https?:|//\w|@import|url\(", re.sub(r"base64,[A-Za-z0-9+/=]+", "", text))
    plots = {path.stem: path.read_bytes() for path in (folder.path / "plots").iterdir()}
    assert set(plots) == PLOTS
    embedded = [base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) for image in page.all("img")]
    assert sorted(embedded) == sorted(plots.values())
    assert all(data.startswith(b"\x89PNG") for data in embedded)


def test_page_is_accessible(usual):
    _, page = usual
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == 1
    images = [image["alt"] for image in page.all("img")]
    assert len(images) == len(PLOTS) == len(set(images))
    assert all(len(alt) > 20 for alt in images)
    assert "72.4% of fp32's activation gradients become zero in fp16; multiplied by 2¹⁷, 0.1% do" in images
    assert all(cell.get("scope") in ("col", "row") for cell in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a} <= set(ids)
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))


@pytest.mark.slow
def test_report_is_reproducible_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "PICTURES", (curves.loss_picture, exponents.exponents_picture))
    folder = write(tmp_path / "run", {"fp32": Run()}, Experiment(recipes=("fp32",), steps=20))

    def files():
        own = [folder.path / "report.html", folder.path / "summary.json", *(folder.path / "plots").iterdir()]
        return {path.name: path.read_bytes() for path in own}

    write_report(folder)
    first = files()
    write_report(folder)
    assert files() == first
    assert not list(folder.path.rglob("*.partial"))


HOSTILE = """<script>alert("1")</script>&'"><img src=x onerror=y>$x^2$ $"""


@pytest.mark.slow
def test_html_in_strings_is_escaped(tmp_path):
    names = ("fp32", "_$\\frac", "<b>ünsafe\u4e2d</b> & $a$ " + "long" * 20)
    runs = dict.fromkeys(names, Run()) | {names[2]: Run(diverges=3, first_bad=HOSTILE)}
    experiment = usual_experiment(names, steps=20, model=HOSTILE, data=HOSTILE)
    folder = write(
        tmp_path / "<i>run", {n.replace("/", "∕"): r for n, r in runs.items()} | runs, experiment, {HOSTILE: HOSTILE}
    )
    page = report(folder)
    assert not page.all("script")
    assert not page.all("i")
    assert not page.all("b")
    assert not [image for image in page.all("img") if image["src"] == "x"]
    assert page.text.count(HOSTILE) >= 4  # the tensor, the model, the data, the environment
    assert all(name in page.text for name in names)
    assert "<i>run" in page.text


KINDS = {
    "killed": (changed("bf16-mixed", killed=30) | {"fp32": Run(killed=70)}, {}, "not finished"),
    "killed before a step": (dict.fromkeys(USUAL, Run(killed=1)), {}, "not finished"),
    "not begun": ({"fp32": Run()}, {"recipes": ("fp32", "bf16-pure")}, "not begun"),
    "nothing begun": ({}, {"recipes": ("fp32", "bf16-pure")}, "not begun"),
    "all diverged at once": (dict.fromkeys(USUAL, Run(diverges=1, first_bad=None)), {}, "diverged at step 1"),
    "no fp32": ({"bf16-mixed": Run(), "fp16-mixed": USUAL["fp16-mixed"]}, {}, "fp32 took no part"),
    "one seed each": (USUAL, {"seeds": 1, "baseline_seeds": 1}, "it takes two seeds to see how far seeds differ"),
    "one seed beside three": (USUAL, {"seeds": 1, "margin": 1e-4}, "seeds would decide"),
    "one recipe": ({"bf16-mixed": Run()}, {"seeds": 2, "baseline_seeds": 2}, "halfstep train --recipe bf16-mixed"),
    "only fp32": ({"fp32": Run()}, {}, "only fp32 was trained"),
    "no statistics": ({"fp32": Run(statistics=False)}, {}, "no run has written statistics yet"),
    "far off": ({"fp32": Run(), "bf16-pure": Run(excess=30.0), "fp16-pure": Run(excess=-0.9)}, {}, "degrades"),
    "one step": ({"fp32": Run(), "bf16-mixed": Run()}, {"steps": 1}, "matches"),
}


RENDERED = {"all diverged at once", "far off"}
"""Only these kinds render images; the others just build the figures."""


@pytest.mark.quick("all diverged at once", "killed", "no fp32")
@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind != "far off", KINDS))
def test_report_of_every_kind_of_folder(kind, tmp_path, request):
    runs, fields, words = KINDS[kind]
    if kind not in RENDERED:
        request.getfixturevalue("unrendered")
    fields = {"recipes": tuple(runs), "steps": 100, **fields}
    page = report(write(tmp_path / "run", runs, Experiment(**fields)))
    assert words in page.text
    assert len(page.all("h2")) == 1 + len(PLOTS) + 3
    assert len(page.all("img")) == len(list((tmp_path / "run" / "plots").iterdir()))


def test_copied_fp32_runs_are_the_baseline(tmp_path):
    """`halfstep train` copies cached fp32 runs into the folder without naming fp32 as a recipe."""
    both = write(tmp_path / "run", {"fp32": Run(), "bf16-mixed": Run(0.02)}, usual_experiment(("fp32", "bf16-mixed")))
    edited(both.experiment_file, recipes=["bf16-mixed"], baseline_seeds=1)
    summary = load(both).summary()
    assert [v["recipe"] for v in summary["verdicts"]] == ["fp32", "bf16-mixed"]
    assert (summary["band"]["seeds"], summary["verdicts"][1]["status"]) == (3, "degrades")


def test_stale_plot_is_removed(tmp_path, unrendered):
    folder = write(tmp_path / "run", {"fp32": Run()}, Experiment(recipes=("fp32",), steps=10))
    stale = folder.path / "plots" / "gap.png"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    write_report(folder)
    assert not stale.exists()


def test_damaged_file_raises_with_its_name(tmp_path, unrendered):
    folder = write(tmp_path / "run", {"fp32": Run()}, Experiment(recipes=("fp32",), steps=10))
    folder.environment_file.write_text("{")
    with pytest.raises(RunError, match=r"environment\.json cannot be read as JSON"):
        write_report(folder)
    folder.environment_file.unlink()
    assert "The folder holds no environment.json." in report(folder).text


def test_command_reproduces_the_experiment():
    path = Path("runs/a b")
    experiment = Experiment(recipes=("fp32", "bf16-mixed"), steps=900, data="my data/*.txt", lr=0.002)
    expected = "halfstep compare --recipes fp32,bf16-mixed --data 'my data/*.txt' --steps 900 --lr 0.002"
    assert pages.command(experiment, path) == f"{expected} --out 'runs/a b' --resume"
    one = Experiment(recipes=("fp32",), seeds=2, baseline_seeds=2)
    assert pages.command(one, path) == "halfstep train --recipe fp32 --seeds 2 --out 'runs/a b' --resume"
    assert pages.command(Experiment(recipes=("fp32",), warmup=1), path) is None


def test_report_needs_neither_torch_nor_pyplot(tmp_path):
    folder = write(tmp_path / "run", {"fp32": Run(killed=1)}, Experiment(recipes=("fp32",), steps=10))
    code = (
        "import sys, pathlib, warnings; "  # raised by matplotlib 3.9 with the newest pyparsing
        "warnings.filterwarnings('ignore', category=DeprecationWarning, module='matplotlib'); "
        "from halfstep.lab.report import write_report; from halfstep.lab.experiment import RunFolder; "
        f"write_report(RunFolder(pathlib.Path({str(folder.path)!r}))); "
        "bad = {'torch', 'matplotlib.pyplot'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=dict(os.environ))
