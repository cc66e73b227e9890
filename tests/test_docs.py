"""The README's and the docs' Python examples run, page by page, and so do the scripts in examples/."""

import re
import runpy
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize(
    "link", sorted({(p, t) for p in PAGES for t in re.findall(r"\]\(([^)#]+)", p.read_text())}), ids=str
)
def test_links_between_pages_lead_somewhere(link):
    page, target = link
    assert target.startswith("https://") or (page.parent / target).exists()


def test_example_of_lost_updates_ends_where_arithmetic_says():
    ends = runpy.run_path(str(ROOT / "examples" / "lost_updates.py"))["main"]()
    assert ends["fp32"] == ends["bf16-master"] == 0.0
    assert ends["bf16-nomaster"] == ends["fp16-pure"] == 1.0
    assert abs(ends["bf16-stochastic"]) < 0.01


def test_example_of_an_own_loop_learns():
    example = runpy.run_path(str(ROOT / "examples" / "own_loop.py"))["main"]
    assert example("bf16-stochastic", steps=60) < 0.5


@pytest.mark.parametrize("recipe", ["fp16-mixed", "bf16-master"])
def test_example_of_nanogpts_loop_learns(recipe):
    assert runpy.run_path(str(ROOT / "examples" / "nanogpt_loop.py"))["main"](recipe, max_iters=40) < 1.2


def test_example_of_a_quantised_model_computes_what_the_trained_one_did():
    trained, loaded = runpy.run_path(str(ROOT / "examples" / "quantized.py"))["main"](steps=40)
    assert trained == loaded < 0.4
